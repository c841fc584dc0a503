"""One answer, generated token by token on the model's thread and sent by the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import GenerationConfig

from specache_compile.batching.request import Logprobs

from .metrics import Metrics
from .parts import Parts
from .stops import Stops
from .token_bytes import bytes_of

# Last prompt tokens to decode a continuation with: at least as many as a character may have.
BEFORE = 8


class ClientLeft(Exception):
    """The client has disconnected."""


class Stopped(Exception):
    """The answer contains a stop string."""


@dataclass(eq=False)
class Ticket:
    """One HTTP request: its arrival (`time.perf_counter`), whether its client has disconnected, and its answers."""

    came: float = field(default_factory=time.perf_counter)
    left: threading.Event = field(default_factory=threading.Event)
    answers: list[Answer] = field(default_factory=list)


@dataclass(frozen=True)
class Question:
    """The input of one generation.

    penalties: frequency and presence penalty.
    parser: separates reasoning and tool calls from text; None: all is text.
    logprobs: number of likeliest tokens to report for each token; None: no log-probabilities.
    continued: the answer continues the prompt's text. At the start of other text some tokenizers drop the first space.
    special: special tokens are part of the text.
    matcher: llguidance's matcher of the answer's grammar; None: any text.
    words: 32-bit words in a mask of allowed tokens.
    """

    inputs: Any
    config: GenerationConfig
    stop: tuple[str, ...] = ()
    seed: int | None = None
    penalties: tuple[float, float] = (0.0, 0.0)
    parser: Any = None
    logprobs: int | None = None
    continued: bool = False
    special: bool = False
    matcher: Any = None
    words: int = 0

    @property
    def tokens(self) -> int:
        return int(self.inputs["input_ids"].shape[1])


@dataclass(frozen=True)
class Likely:
    """A token of an answer, or one of the likeliest at its place.

    token: its id.
    text: with U+FFFD if the token is a part of a character.
    logprob: the natural logarithm of its probability.
    bytes: its UTF-8 bytes.
    likeliest: the likeliest tokens at its place.
    """

    token: int
    text: str
    logprob: float
    bytes: bytes
    likeliest: tuple[Likely, ...] = ()


class Answer:
    """An answer receives its tokens, the prompt first; `ids` has all of them.

    The event loop that created it reads its pieces: text, reasoning and tool calls.

    started: the batch has begun to prefill it.
    reused: prompt tokens that a session had cached.
    """

    def __init__(self, ticket: Ticket, question: Question, tokenizer: Any, metrics: Metrics) -> None:
        self.ticket, self.question, self.metrics = ticket, question, metrics
        self.ids: list[int] = []
        self.prompt = self.reused = 0
        self.started = False
        self.stops = Stops(question.stop)
        self.loop, self.queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        self.rust, self.parts = tokenizer._tokenizer, Parts(question.parser)
        # A parser needs special tokens.
        self.decoder = DecodeStream([], skip_special_tokens=self.parts.plain and not question.special)
        ends = question.config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])

    @property
    def generated(self) -> int:
        """Tokens of the answer."""
        return max(0, len(self.ids) - self.prompt)

    @property
    def finish(self) -> str:
        ended = self.stops.found or self.ids[-1] in self.ends
        return "length" if not ended and self.generated >= (self.question.config.max_new_tokens or 0) else "stop"

    def put(self, tokens: Tensor) -> None:
        """Append tokens. Raises ClientLeft or Stopped when generation must end."""
        new = tokens.flatten().tolist()
        if not self.prompt:
            self.prompt, self.ids = len(new), new  # in this order, since other threads read `generated` meanwhile
            if self.question.continued:
                self.decoder = DecodeStream(new[-BEFORE:], skip_special_tokens=not self.question.special)
        else:
            self.append(new)
        if self.ticket.left.is_set():
            raise ClientLeft

    def note(self, token: int, known: Logprobs) -> None:
        """Send the log-probabilities of the token that `put` gets next. Like at OpenAI, the stop token has none."""
        if token not in self.ends:
            likeliest = tuple(self.likely(other, value) for other, value in known.likeliest)
            self.send([self.likely(token, known.chosen, likeliest)])

    def likely(self, token: int, logprob: float, likeliest: tuple[Likely, ...] = ()) -> Likely:
        text = self.text_of(token)
        return Likely(token, text, logprob, bytes_of(self.rust, token, text), likeliest)

    def text_of(self, token: int) -> str:
        """The token's text after the token before it: some decoders drop the space of a first token."""
        before = self.ids[-1:]
        had, whole = (self.rust.decode(ids, skip_special_tokens=False) for ids in (before, [*before, token]))
        return str(whole.removeprefix(had))

    def append(self, tokens: list[int]) -> None:
        if not self.generated:
            self.metrics.first_token.observe(time.perf_counter() - self.ticket.came)
            self.send(self.parts.opened())  # not earlier, since a client would count it as a token
        for token in tokens:
            self.ids.append(token)
            self.metrics.generated_tokens.inc()
            text = "" if token in self.ends else self.decoder.step(self.rust, token) or ""
            # As in vLLM, a stop string before `min_tokens` is text.
            self.send_text(self.stops.feed(text, self.generated > (self.question.config.min_new_tokens or 0)))
            if self.stops.found:
                raise Stopped

    def close(self) -> None:
        self.send([*self.parts.feed(self.stops.withheld, last=True), None])

    def fail(self, error: Exception) -> None:
        self.send([error])

    def send_text(self, text: str) -> None:
        plain = self.parts.plain
        self.send(self.parts.feed(text))
        if self.parts.plain and not plain:
            self.decoder = DecodeStream([], skip_special_tokens=not self.question.special)

    def send(self, pieces: list[Any]) -> None:
        for piece in pieces:
            self.loop.call_soon_threadsafe(self.queue.put_nowait, piece)

    async def pieces(self) -> AsyncIterator[Any]:
        """Yield text, `ReasoningText` and `ToolCall` as they come, each after the `Likely` of its tokens.

        Raises the generation's exception.
        """
        while (piece := await self.queue.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            yield piece
