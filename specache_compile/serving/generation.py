"""One request after the other through the model, each on the conversation that it goes on with.

It takes the place of the generation manager of `transformers serve`, whose handlers call it with token ids.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from fastapi import HTTPException
from torch import Tensor
from transformers.cli.serving.utils import DirectStreamer, GenerateManager, GenerationState, _StreamError

from specache_compile.runtime.records import find_record
from specache_compile.runtime.session import session_of
from specache_compile.runtime.stats import stats

from .conversation import Conversation
from .conversations import Conversations
from .metrics import Metrics

# Tokens that an answer may have where a request does not say.
ANSWER = 1024


class ClientLeft(Exception):
    """Nobody waits for what is being generated."""


@dataclass(eq=False)
class Ticket:
    """One request: when it came (`time.perf_counter`), whether its client has left, the seed that it asks for."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    came: float = field(default_factory=time.perf_counter)
    left: threading.Event = field(default_factory=threading.Event)
    seed: int | None = None


@dataclass
class Listener:
    """What `generate` hands its tokens to, the prompt first: it keeps them, forwards them to a stream where there is
    one, and stops the generation when the client has left."""

    ticket: Ticket
    metrics: Metrics
    stream: DirectStreamer | None
    ids: list[int] = field(default_factory=list)
    prompt: int | None = None

    def put(self, tokens: Tensor) -> None:
        new = tokens.flatten()
        self.ids += new.tolist()
        if self.prompt is None:
            self.prompt = len(new)
        else:
            if len(self.ids) - len(new) == self.prompt:
                self.metrics.first_token.observe(time.perf_counter() - self.ticket.came)
            self.metrics.generated_tokens.inc(len(new))
        if self.ticket.left.is_set():
            raise ClientLeft
        if self.stream is not None:
            self.stream.put(new)

    def end(self) -> None:
        """Nothing is told of an end before the conversation is kept: the next turn may be here at once."""


class Stream(DirectStreamer):
    """Text for a handler's stream. The request's end stops a generation, not this."""

    def cancel(self) -> None:
        pass


class Generation(GenerateManager):
    """The queue before one model, and what works it off, on one thread."""

    def __init__(self, model: Any, conversations: Conversations, metrics: Metrics, longest: int, queue: int) -> None:
        super().__init__()
        self.model, self.conversations, self.metrics = model, conversations, metrics
        self.longest, self.queue = longest, queue
        # By id, as the handlers hand it on; a request holds its own.
        self.tickets: weakref.WeakValueDictionary[str, Ticket] = weakref.WeakValueDictionary()
        self.waiting: list[Ticket] = []
        metrics.queue.set_function(self.queued)
        for place in ("host", "device"):
            metrics.session_bytes.labels(place).set_function(partial(conversations.total, place))
        folder = conversations.folder
        if folder is not None:
            metrics.session_bytes.labels("disk").set_function(folder.total)
        metrics.sessions.labels("memory").set_function(lambda: len(conversations.in_memory))
        metrics.sessions.labels("disk").set_function(lambda: len(conversations.on_disk))

    def queued(self) -> int:
        return sum(not ticket.left.is_set() for ticket in list(self.waiting))

    def admit(self, request_id: str, prompt: int, config: Any) -> Ticket:
        """A place in the queue, and the longest answer that there is room for where none was asked for. HTTPException
        where the request is too long, or too many wait."""
        room = self.longest - prompt
        if prompt == 0:
            raise HTTPException(400, "the prompt is empty")
        if room < (config.max_new_tokens or 1):
            answer = "" if config.max_new_tokens is None else f", and {config.max_new_tokens:,} would follow"
            raise HTTPException(
                400, f"the prompt has {prompt:,} tokens{answer}: the model's context is {self.longest:,}"
            )
        if self.queued() >= self.queue:
            raise HTTPException(503, f"{self.queue} requests wait already", headers={"Retry-After": "1"})
        config.max_new_tokens = config.max_new_tokens or min(ANSWER, room)
        ticket = self.tickets[request_id]
        self.waiting.append(ticket)
        return ticket

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue, DirectStreamer]:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        stream = Stream(processor._tokenizer, loop, queue, response_parser)
        ticket = self.admit(request_id, inputs["input_ids"].shape[1], gen_config)

        def answer() -> None:
            try:
                self.run(ticket, inputs, gen_config, processor, stream)
                stream.end()
            except ClientLeft:
                pass
            except Exception as error:  # the stream has begun, and can say so in no other way
                # The handler puts the message into JSON as it is.
                message = json.dumps(str(error))[1:-1]
                loop.call_soon_threadsafe(queue.put_nowait, _StreamError(message))

        self.submit(answer)
        return queue, stream

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, Any]:
        prompt = inputs["input_ids"].shape[1]
        ticket = self.admit(request_id, prompt, gen_config)

        def answer() -> list[int]:
            try:
                return self.run(ticket, inputs, gen_config, processor, None)
            except ClientLeft:
                return []

        # The thread cannot fill in a future that was cancelled.
        ids = await asyncio.shield(asyncio.wrap_future(self.submit(answer)))
        return processor.decode(ids[prompt:], skip_special_tokens=True), prompt, ids[prompt:]

    def run(self, ticket: Ticket, inputs: Any, config: Any, processor: Any, stream: Any) -> list[int]:
        """The prompt's and the answer's token ids, on the thread of the model. ClientLeft where the client has."""
        self.waiting.remove(ticket)
        if ticket.left.is_set():
            raise ClientLeft
        with self.metrics.running.track_inprogress():
            return self.go_on(ticket, inputs, config, processor, stream)

    def go_on(self, ticket: Ticket, inputs: Any, config: Any, processor: Any, stream: Any) -> list[int]:
        ids = inputs["input_ids"]
        conversation = self.conversations.take(ids[0].cpu())
        self.metrics.prompt_tokens.labels("reused").inc(len(conversation.ids))
        self.metrics.prompt_tokens.labels("computed").inc(ids.shape[1] - len(conversation.ids))
        if ticket.seed is None:  # not the numbers that follow another client's
            torch.seed()
        else:
            torch.manual_seed(ticket.seed)
        listener = Listener(ticket, self.metrics, stream)
        try:
            self.model.generate(
                **inputs, past_key_values=conversation.cache, generation_config=config, tokenizer=processor,
                streamer=listener,
            )  # fmt: skip
        except ClientLeft:  # between two steps: what was read and said may be gone on with
            self.keep(conversation, listener)
            raise
        self.keep(conversation, listener)
        return listener.ids

    def keep(self, conversation: Conversation, listener: Listener) -> None:
        """The conversation as it stands after a generation, for the next turn."""
        self.count(conversation)
        held = conversation.cache.get_seq_length()
        conversation.prompt = min(listener.prompt or 0, held)
        # Where a step is taken ahead of the stop, the cache holds a token that nobody was told.
        conversation.ids = torch.tensor(listener.ids[:held], dtype=torch.int64)
        if held and held == len(conversation.ids):
            self.conversations.put(conversation)
            self.submit(self.conversations.trim)  # to disk, it takes a while: nobody's answer waits for it

    def count(self, conversation: Conversation) -> None:
        """The bytes that its session has moved since it was last counted."""
        record, session = find_record(self.model), session_of(conversation.cache)
        if record is None or session is None or record.latest is not session.statistics:  # no step was taken
            return
        found = stats(self.model)
        moved = (found.bytes_to_device, found.bytes_to_host)
        for to, now, before in zip(("device", "host"), moved, conversation.moved, strict=True):
            self.metrics.moved_bytes.labels(to).inc(max(0, now - before))
        conversation.moved = moved
        if found.hit_rate is not None:
            self.metrics.hit_rate.labels("mass").set(found.hit_rate.mass)
            self.metrics.hit_rate.labels("top_k").set(found.hit_rate.top_k)

    def stop(self) -> None:
        """After what is queued; conversations go to disk, where there is a folder."""
        self.submit(self.conversations.close).result()


class OneQueue(GenerationState):
    """The handlers' way to the one generation manager."""

    def __init__(self, generation: Generation) -> None:
        super().__init__()
        self.generation = generation

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        return self.generation
