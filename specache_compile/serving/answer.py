"""One answer, from the model's thread, which says it token by token, to the event loop, which sends it."""

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

from .metrics import Metrics
from .parts import Parts
from .stops import Stops

# Tokens of a prompt that its continuation is read with: as many as a character may have, and more.
BEFORE = 8


class ClientLeft(Exception):
    """Nobody waits for what is being generated."""


class Stopped(Exception):
    """A stop string was said."""


@dataclass(eq=False)
class Ticket:
    """One request: when it came (`time.perf_counter`), and whether its client has left."""

    came: float = field(default_factory=time.perf_counter)
    left: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Question:
    """What the model is asked. `opening`: tokens that the template puts before an answer, at the prompt's end: the next
    turn's may lack them. `penalties`: for frequency and presence. `parser`: what takes reasoning and calls of tools out
    of an answer, if anything does. `continued`: whether the answer goes on with the prompt's text, and is none of its
    own, whose first space some tokenizers take away."""

    inputs: Any
    config: GenerationConfig
    opening: int = 0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    penalties: tuple[float, float] = (0.0, 0.0)
    parser: Any = None
    continued: bool = False

    @property
    def tokens(self) -> int:
        return int(self.inputs["input_ids"].shape[1])


class Answer:
    """What `generate` hands its tokens to, the prompt first: `ids` are all of them. Its pieces (text, reasoning, calls
    of tools) are read on the event loop that made it."""

    def __init__(self, ticket: Ticket, question: Question, tokenizer: Any, metrics: Metrics) -> None:
        self.ticket, self.question, self.metrics = ticket, question, metrics
        self.ids: list[int] = []
        self.prompt = 0
        self.stops = Stops(question.stop)
        self.loop, self.queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        self.rust, self.parts = tokenizer._tokenizer, Parts(question.parser)
        self.decoder = DecodeStream([], skip_special_tokens=self.parts.plain)  # a parser goes by them
        ends = question.config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])

    @property
    def said(self) -> int:
        """Tokens of the answer."""
        return len(self.ids) - self.prompt

    @property
    def finish(self) -> str:
        ended = self.stops.found or self.ids[-1] in self.ends
        return "length" if not ended and self.said >= (self.question.config.max_new_tokens or 0) else "stop"

    def put(self, tokens: Tensor) -> None:
        """Called by `generate`. ClientLeft and Stopped end it."""
        new = tokens.flatten().tolist()
        if not self.prompt:
            self.ids, self.prompt = new, len(new)
            if self.question.continued:
                self.decoder = DecodeStream(new[-BEFORE:], skip_special_tokens=True)
        else:
            self.say(new)
        if self.ticket.left.is_set():
            raise ClientLeft

    def say(self, tokens: list[int]) -> None:
        if not self.said:
            self.metrics.first_token.observe(time.perf_counter() - self.ticket.came)
            self.send(self.parts.opened())  # not before: it would be taken for a token
        for token in tokens:
            self.ids.append(token)
            self.metrics.generated_tokens.inc()
            text = "" if token in self.ends else self.decoder.step(self.rust, token) or ""
            # As vLLM has it: a stop string that comes too early is text.
            self.send_text(self.stops.feed(text, self.said > (self.question.config.min_new_tokens or 0)))
            if self.stops.found:
                raise Stopped

    def end(self) -> None:
        """`generate` tells of an end before the conversation is kept, and the next turn may be here at once: `close`
        tells it."""

    def close(self) -> None:
        self.send([*self.parts.feed(self.stops.withheld, last=True), None])

    def fail(self, error: Exception) -> None:
        self.send([error])

    def send_text(self, text: str) -> None:
        plain = self.parts.plain
        self.send(self.parts.feed(text))
        if self.parts.plain and not plain:
            self.decoder = DecodeStream([], skip_special_tokens=True)

    def send(self, pieces: list[Any]) -> None:
        for piece in pieces:
            self.loop.call_soon_threadsafe(self.queue.put_nowait, piece)

    async def pieces(self) -> AsyncIterator[Any]:
        """Text, `ReasoningText` and `ToolCall`, as they come. Raises what the generation has raised."""
        while (piece := await self.queue.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            yield piece
