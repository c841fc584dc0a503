"""One answer, generated token by token on the model's thread and sent by the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import GenerationConfig, LogitsProcessorList
from transformers.cli.serving.utils import ReasoningText, ToolCall

from .metrics import Metrics

# transformers' names of the field, by version.
REASONING = ("reasoning_content", "thinking", "reasoning")
# Last prompt tokens to decode a continuation with: at least as many as a character may have.
BEFORE = 8


@dataclass(frozen=True)
class Question:
    """The input of one generation.

    ids: the prompt's tokens.
    processors: of logits, for fields that `generate` has no setting for.
    parser: separates reasoning and tool calls from text; None: all is text.
    continued: the answer continues the prompt's text. At the start of other text some tokenizers drop the first space.
    """

    ids: list[int]
    config: GenerationConfig
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    stop: tuple[str, ...] = ()
    seed: int | None = None
    parser: Any = None
    continued: bool = False


class Answer:
    """An answer receives its tokens, and the event loop that created it reads its pieces: text, reasoning, tool calls.

    left: the client has disconnected.
    started: the batch has begun to prefill the prompt.
    reused: prompt tokens that a session had cached.
    generated: number of tokens so far.
    finish: why it ends: "length", or "stop" for a stop token or a stop string.
    """

    def __init__(self, question: Question, tokenizer: Any, metrics: Metrics) -> None:
        self.question, self.metrics = question, metrics
        self.came, self.left = time.perf_counter(), threading.Event()
        self.started, self.reused, self.generated, self.finish = False, 0, 0, "stop"
        self.loop, self.queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        self.rust, self.parts, self.stops = tokenizer._tokenizer, Parts(question.parser), Stops(question.stop)
        before = question.ids[-BEFORE:] if question.continued else []
        self.decoder = DecodeStream(before, skip_special_tokens=self.parts.plain)  # a parser needs special tokens
        ends = question.config.eos_token_id
        self.stop_tokens = set(ends if isinstance(ends, list) else [ends])

    def put(self, token: int) -> bool:
        """Append a token. True if the answer has ended with a stop string."""
        if not self.generated:
            self.metrics.first_token.observe(time.perf_counter() - self.came)
            self.send(self.parts.opened())  # not earlier, since a client would count it as a token
        self.generated += 1
        self.metrics.generated_tokens.inc()
        stopped = token in self.stop_tokens
        text = "" if stopped else self.decoder.step(self.rust, token) or ""
        # As in vLLM, a stop string before `min_tokens` is text.
        text = self.stops.feed(text, self.generated > (self.question.config.min_new_tokens or 0))
        self.send(self.parts.feed(text))
        if self.generated == self.question.config.max_new_tokens and not (stopped or self.stops.found):
            self.finish = "length"
        return self.stops.found

    def end(self, error: Exception | None = None) -> None:
        """Send what is withheld and the end, or an error."""
        self.send([error] if error else [*self.parts.feed(self.stops.withheld, last=True), None])

    def send(self, pieces: list[Any]) -> None:
        for piece in pieces:
            self.loop.call_soon_threadsafe(self.queue.put_nowait, piece)

    async def pieces(self) -> AsyncIterator[Any]:
        """Yield text, `ReasoningText` and `ToolCall` as they come. Raises the generation's exception."""
        while (piece := await self.queue.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            yield piece


class Stops:
    """Passes text through, but withholds what may begin a stop string until more text comes.

    found: whether there was a stop string; the text after it is dropped.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings, self.withheld, self.found = strings, "", False

    def feed(self, text: str, heeded: bool = True) -> str:
        """The text that may be sent after `text`. heeded: whether a stop string that `text` completes counts."""
        text = self.withheld + text
        # The string that is complete first, independent of how the text is split.
        ends = [(at + len(string), at) for string in self.strings if (at := text.find(string)) >= 0]
        if ends and heeded:
            self.found, self.withheld = True, ""
            return text[: min(ends)[1]]
        at = len(text) - max((overlap(text, string) for string in self.strings), default=0)
        self.withheld = text[at:]
        return text[:at]


def overlap(text: str, string: str) -> int:
    """Number of characters at the end of `text` that `string` begins with."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)


class Parts:
    """Splits an answer's text into parts.

    unread: text that is in no part yet.
    plain: all further text is one part: without a parser, or after text that the parser cannot read (for example a tool
        call that is not JSON or is cut short).
    """

    def __init__(self, parser: Any) -> None:
        self.parser, self.unread = parser, ""

    @property
    def plain(self) -> bool:
        return self.parser is None

    def opened(self) -> list[Any]:
        """The parts of the answer that the prompt began."""
        return [] if self.plain else list(pieces_of(self.parser.initial_events))

    def feed(self, text: str, last: bool = False) -> list[Any]:
        """The parts that are known after `text`. last: no more text follows."""
        pieces: list[Any] = []
        # Letter by letter, so that `unread` begins where a region ends.
        for letter in [*text, *[""] * last]:
            self.unread += letter
            if self.plain:
                continue
            try:
                events = self.parser.feed(letter) if letter else self.parser.finalize()[1]
                pieces += pieces_of(events)
            except (ValueError, KeyError, TypeError):  # a model has written the text, so it may be anything
                self.parser = None
            else:
                self.note(events)
        if self.plain and self.unread:
            pieces, self.unread = [*pieces, self.unread], ""
        return pieces

    def note(self, events: list[dict[str, Any]]) -> None:
        kinds = [event["type"] for event in events]
        for event, following in zip(events, [*kinds[1:], None], strict=False):
            if event["type"] == "region_chunk" and not event.get("dirty"):
                self.unread = self.unread.partition(event["text"])[2]
            elif event["type"] == "region_close" and following != "region_open":  # by its own end
                self.unread = ""


def pieces_of(events: list[dict[str, Any]]) -> Iterator[Any]:
    """Text, `ReasoningText` and `ToolCall`s of a parser's events. Raises for a call without a name or arguments."""
    for event in events:
        field = event["field"]
        if event["type"] == "region_close" and field == "tool_calls":
            calls = event["value"] if isinstance(event["value"], list) else [event["value"]]
            yield from [called(**call["function"]) for call in calls]
        elif event["type"] == "region_chunk" and not event["dirty"] and event["text"]:
            if field == "content":
                yield event["text"]
            elif field in REASONING:
                yield ReasoningText(event["text"])


def called(name: str, arguments: Any = None, parameters: Any = None, **more: Any) -> ToolCall:
    given = parameters if arguments is None else arguments
    if given is None:
        raise TypeError("a call without arguments")
    return ToolCall(name, given if isinstance(given, str) else json.dumps(given))
