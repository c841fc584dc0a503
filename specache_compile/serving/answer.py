"""One answer on its way from the model's thread, which makes it token by token, to the event loop, which sends it."""

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

# The prompt's last tokens that a continuation is decoded with: at least as many as a character may have.
BEFORE = 8


class ClientLeft(Exception):
    """The client has left, so nobody waits for the answer."""


class Stopped(Exception):
    """The answer has a stop string."""


@dataclass(eq=False)
class Ticket:
    """One request: its time of arrival (`time.perf_counter`), and whether its client has left, and its
    answers."""

    came: float = field(default_factory=time.perf_counter)
    left: threading.Event = field(default_factory=threading.Event)
    answers: list[Answer] = field(default_factory=list)


@dataclass(frozen=True)
class Question:
    """What the model is asked.

    opening: how many tokens at the prompt's end the template puts before an answer; the next turn may lack them.
    penalties: for frequency and presence.
    parser: takes reasoning and tool calls out of an answer; None: nothing does.
    logprobs: of how many of the likeliest tokens to tell how likely they were; None: of none, nor of the answer's.
    continued: whether the answer goes on with the prompt's text. Of any other text some tokenizers drop the first
    space.
    special: whether special tokens are a part of the text.
    matcher: llguidance's, of the grammar that the answer follows; None: it is any text.
    words: of 32 bits, in a mask of the tokens that it allows.
    """

    inputs: Any
    config: GenerationConfig
    opening: int = 0
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
    """A token of an answer, or one of the likeliest in its place.

    token: its id.
    text: with U+FFFD where the token is a part of a character.
    logprob: the natural logarithm of its probability.
    bytes: its own, of UTF-8.
    likeliest: in its place.
    """

    token: int
    text: str
    logprob: float
    bytes: bytes
    likeliest: tuple[Likely, ...] = ()


class Answer:
    """It is given its tokens, the prompt first; `ids` has all of them.

    The event loop that made the answer reads its pieces: text, reasoning and tool calls.

    reused: tokens of the prompt that a session had.
    """

    def __init__(self, ticket: Ticket, question: Question, tokenizer: Any, metrics: Metrics) -> None:
        self.ticket, self.question, self.metrics = ticket, question, metrics
        self.ids: list[int] = []
        self.prompt = self.reused = 0
        self.stops = Stops(question.stop)
        self.loop, self.queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        self.rust, self.parts = tokenizer._tokenizer, Parts(question.parser)
        # A parser goes by special tokens.
        self.decoder = DecodeStream([], skip_special_tokens=self.parts.plain and not question.special)
        ends = question.config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])

    @property
    def said(self) -> int:
        """Tokens of the answer."""
        return max(0, len(self.ids) - self.prompt)

    @property
    def finish(self) -> str:
        ended = self.stops.found or self.ids[-1] in self.ends
        return "length" if not ended and self.generated >= (self.question.config.max_new_tokens or 0) else "stop"

    def put(self, tokens: Tensor) -> None:
        """More tokens. ClientLeft and Stopped end them."""
        new = tokens.flatten().tolist()
        if not self.prompt:
            self.prompt, self.ids = len(new), new  # in this order: others ask for `said` meanwhile
            if self.question.continued:
                self.decoder = DecodeStream(new[-BEFORE:], skip_special_tokens=not self.question.special)
        else:
            self.say(new)
        if self.ticket.left.is_set():
            raise ClientLeft

    def note(self, token: int, known: Logprobs) -> None:
        """How likely the token was that `put` gets next. As at OpenAI, the one that ends a text has no place."""
        if token not in self.ends:
            likeliest = tuple(self.likely(other, value) for other, value in known.likeliest)
            self.send([self.likely(token, known.chosen, likeliest)])

    def likely(self, token: int, logprob: float, likeliest: tuple[Likely, ...] = ()) -> Likely:
        text = self.text_of(token)
        return Likely(token, text, logprob, bytes_of(self.rust, token, text), likeliest)

    def text_of(self, token: int) -> str:
        """Behind the token before: of a text's first token some decoders drop the space."""
        before = self.ids[-1:]
        had, whole = (self.rust.decode(ids, skip_special_tokens=False) for ids in (before, [*before, token]))
        return str(whole.removeprefix(had))

    def say(self, tokens: list[int]) -> None:
        if not self.generated:
            self.metrics.first_token.observe(time.perf_counter() - self.ticket.came)
            self.send(self.parts.opened())  # not earlier: a client would take it for a token
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
        """Yield text, `ReasoningText` and `ToolCall` as they come, before them the `Likely` of their tokens. Raises
        the generation's exception."""
        while (piece := await self.queue.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            yield piece
