"""Requests run through the model one after another, each on its conversation."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from fastapi import HTTPException
from transformers import LogitsProcessorList
from transformers.cli.serving.utils import InferenceThread

from specache_compile.runtime.records import find_record
from specache_compile.runtime.session import session_of
from specache_compile.runtime.stats import stats

from .answer import Answer, ClientLeft, Question, Stopped, Ticket
from .conversation import Conversation, can_crop
from .conversations import Conversations
from .metrics import Metrics
from .model import ServedModel
from .questions import Penalties

# The most tokens of an answer where a request does not say.
ANSWER = 1024
STOPPING = "the server is being stopped: ask again when it is back"


class Generation:
    """The queue before one model and its worker, a single thread: recorded steps belong to one thread."""

    def __init__(
        self, served: ServedModel, conversations: Conversations, metrics: Metrics, longest: int, queue: int
    ) -> None:
        self.model, self.tokenizer = served.model, served.tokenizer
        self.conversations, self.metrics = conversations, metrics
        self.longest, self.queue = longest, queue
        self.thread = InferenceThread()
        self.waiting: list[Ticket] = []
        self.open: set[Answer] = set()
        self.stopping = False
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

    def begin(self, ticket: Ticket, question: Question) -> Answer:
        """Queue a request and return its future answer. HTTPException where it is too long, or too many are waiting."""
        config, prompt = question.config, question.tokens
        room, least = self.longest - prompt, config.max_new_tokens or config.min_new_tokens or 1
        if prompt == 0:
            raise HTTPException(400, "the prompt is empty")
        if room < least:
            more = f", and {least:,} would follow" if config.max_new_tokens or config.min_new_tokens else ""
            raise HTTPException(400, f"the prompt has {prompt:,} tokens{more}: the model's context is {self.longest:,}")
        if self.stopping:
            raise HTTPException(503, STOPPING)
        if self.queued() >= self.queue:
            raise HTTPException(503, f"{self.queue} requests wait already", headers={"Retry-After": "1"})
        config.max_new_tokens = config.max_new_tokens or max(least, min(ANSWER, room))
        answer = Answer(ticket, question, self.tokenizer, self.metrics)
        self.waiting.append(ticket)
        self.open.add(answer)
        self.submit(partial(self.run, answer))
        return answer

    def run(self, answer: Answer) -> None:
        """Generate the answer, on the model's thread."""
        self.waiting.remove(answer.ticket)
        try:
            if not answer.ticket.left.is_set():
                with self.metrics.running.track_inprogress():
                    self.go_on(answer)
        except ClientLeft:
            pass
        except Exception as error:
            answer.fail(error)
        else:
            answer.close()
        finally:
            self.open.discard(answer)

    def go_on(self, answer: Answer) -> None:
        question = answer.question
        conversation = self.conversations.take(question.inputs["input_ids"][0].cpu())
        self.metrics.prompt_tokens.labels("reused").inc(len(conversation.ids))
        self.metrics.prompt_tokens.labels("computed").inc(question.tokens - len(conversation.ids))
        if question.seed is None:  # do not continue another client's random numbers
            torch.seed()
        else:
            torch.manual_seed(question.seed)
        own = [Penalties(*question.penalties, question.tokens)] if any(question.penalties) else []
        try:
            self.model.generate(
                **question.inputs, past_key_values=conversation.cache, generation_config=question.config,
                logits_processor=LogitsProcessorList(own), streamer=answer,
            )  # fmt: skip
        except Stopped:
            self.keep(conversation, answer)
        except ClientLeft:  # raised between two steps: the conversation is whole
            self.keep(conversation, answer)
            raise
        else:
            self.keep(conversation, answer)

    def keep(self, conversation: Conversation, answer: Answer) -> None:
        """Keep the conversation as it is after a generation, for the next turn."""
        self.count(conversation)
        held = conversation.cache.get_seq_length()
        unsaid = held - len(answer.ids)
        if unsaid > 0 and can_crop(conversation.cache):  # a step ran before the stop was found
            conversation.cache.crop(-unsaid)
            held -= unsaid
        conversation.asked = min(answer.prompt - answer.question.opening, held)
        conversation.ids = torch.tensor(answer.ids[:held], dtype=torch.int64, device="cpu")
        if held and held == len(conversation.ids):
            self.conversations.put(conversation)
            self.submit(self.conversations.trim)  # saving to disk is slow, and no answer waits for it

    def count(self, conversation: Conversation) -> None:
        """Count the bytes that its session has moved since the last count."""
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

    def submit(self, work: Any) -> Future:
        return self.thread.submit(work)

    def end_all(self) -> None:
        """End all answers that are still waited for, on the event loop."""
        self.stopping = True
        for answer in list(self.open):
            answer.fail(HTTPException(503, STOPPING))

    def stop(self) -> None:
        """Stop after the queued requests. Conversations go to disk if there is a folder."""
        self.submit(self.conversations.close).result()
