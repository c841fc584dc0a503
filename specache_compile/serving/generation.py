"""Runs requests through the model, each on its conversation, as rows of one batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from fastapi import HTTPException
from torch.utils.weak import WeakIdKeyDictionary
from transformers.cli.serving.utils import InferenceThread

from specache_compile.runtime.records import Statistics, find_record
from specache_compile.runtime.session import session_of
from specache_compile.runtime.stats import stats

from .answer import Answer, Question, Ticket
from .answer_rows import AnswerRows
from .conversation import Conversation, can_crop
from .conversations import Conversations
from .metrics import Metrics
from .served_model import ServedModel

log = logging.getLogger(__name__)

# Most tokens of an answer whose request sets no limit.
ANSWER = 1024
STOPPING = "the server is stopping. Send the request again later"


class Generation:
    """The queue of one model and its thread. It is a single thread, since recorded steps belong to one."""

    def __init__(
        self, served: ServedModel, conversations: Conversations, metrics: Metrics, longest: int, queue: int, rows: int,
        memory: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """rows: most answers that are generated together.

        memory: arguments of the `Batch`, whose pages conversations share.
        """
        self.model, self.tokenizer = served.model, served.tokenizer
        self.conversations, self.metrics = conversations, metrics
        self.longest, self.queue = longest, queue
        self.thread = InferenceThread()
        self.waiting: list[Answer] = []
        self.open: set[Answer] = set()
        self.stopping = False
        self.rows = AnswerRows(
            self.model, rows, self.taken, self.keep, self.ended, {**memory, "give_up": conversations.give_up}
        )
        self.under_way = False
        self.used: list[Statistics] = []
        self.counted: Any = WeakIdKeyDictionary()  # Statistics → bytes to the device and to the host
        metrics.queue.set_function(self.queued)
        for place in ("host", "device"):
            metrics.session_bytes.labels(place).set_function(partial(conversations.total, place))
        folder = conversations.folder
        if folder is not None:
            metrics.session_bytes.labels("disk").set_function(folder.total)
        metrics.sessions.labels("memory").set_function(lambda: len(conversations.in_memory))
        metrics.sessions.labels("disk").set_function(lambda: len(conversations.on_disk))

    def queued(self) -> int:
        return sum(not answer.ticket.left.is_set() for answer in list(self.waiting))

    def begin(self, ticket: Ticket, question: Question) -> Answer:
        """Queue a request and return its answer. HTTPException if it is too long, or too many are waiting."""
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
            raise HTTPException(503, f"{self.queue} requests are waiting. Retry later", headers={"Retry-After": "1"})
        config.max_new_tokens = config.max_new_tokens or max(least, min(ANSWER, room))
        answer = Answer(ticket, question, self.tokenizer, self.metrics)
        self.waiting.append(answer)
        self.open.add(answer)
        self.submit(partial(self.arrive, answer))
        return answer

    def arrive(self, answer: Answer) -> None:
        """Queue an answer for a row, on the model's thread."""
        self.rows.arrived.append(answer)
        self.submit_turn()

    def submit_turn(self) -> None:
        """Submit the next turn, so that other work of the thread runs between turns."""
        if self.rows.busy and not self.under_way:
            self.under_way = True
            self.submit(self.turn)

    def turn(self) -> None:
        try:
            self.rows.turn()
            self.count_all(self.rows.statistics())
        except Exception as error:
            log.exception("a turn failed: all running answers end with its error")
            self.rows.fail_all(error)
        finally:
            self.metrics.running.set(len(self.rows.running))
            self.under_way = False
            self.submit_turn()

    def taken(self, answer: Answer) -> Conversation:
        """The conversation that an answer continues."""
        self.waiting.remove(answer)
        question = answer.question
        conversation = self.conversations.take(question.inputs["input_ids"][0].cpu())
        answer.reused = len(conversation.ids)
        self.metrics.prompt_tokens.labels("reused").inc(len(conversation.ids))
        self.metrics.prompt_tokens.labels("computed").inc(question.tokens - len(conversation.ids))
        return conversation

    def ended(self, answer: Answer) -> None:
        if answer in self.waiting:
            self.waiting.remove(answer)
        self.open.discard(answer)

    def keep(self, conversation: Conversation, answer: Answer) -> None:
        """Keep the conversation after a generation, for the next turn."""
        session = session_of(conversation.cache)
        if session is not None:
            self.count(session.statistics)
        held = conversation.cache.get_seq_length()
        surplus = held - len(answer.ids)
        if surplus > 0 and can_crop(conversation.cache):  # a step ran before the stop was found
            conversation.cache.crop(-surplus)
            held -= surplus
        conversation.request_length = min(answer.prompt - answer.question.opening, held)
        conversation.ids = torch.tensor(answer.ids[:held], dtype=torch.int64, device="cpu")
        if held and held == len(conversation.ids):
            self.conversations.put(conversation)
            self.submit(self.conversations.trim)  # saving to disk is slow, and no answer waits for it

    def forget_prefixes(self) -> None:
        """Drop the cached prompt prefixes and conversations. Call it after writes to weights that the model's key does
        not show (`Batch.forget_prefixes`)."""

        def forget() -> None:
            self.rows.batch.forget_prefixes()
            self.conversations.forget()

        self.submit(forget).result()

    def count_all(self, used: list[Statistics]) -> None:
        """Count the copied bytes of sessions that no step uses any more, because rows have joined or left."""
        still = {id(statistics) for statistics in used}
        for statistics in self.used:
            if id(statistics) not in still:
                self.count(statistics)
        self.used = used

    def count(self, statistics: Statistics) -> None:
        """Count the bytes that a session has copied since the last count."""
        moved = (sum(int(count) for count in [*statistics.fetched, *statistics.corrected]), statistics.bytes_to_host)
        for to, now, before in zip(("device", "host"), moved, self.counted.get(statistics, (0, 0)), strict=True):
            self.metrics.moved_bytes.labels(to).inc(max(0, now - before))
        self.counted[statistics] = moved
        record = find_record(self.model)
        if record is not None and record.latest is statistics and (rate := stats(self.model).hit_rate) is not None:
            self.metrics.hit_rate.labels("mass").set(rate.mass)
            self.metrics.hit_rate.labels("top_k").set(rate.top_k)

    def submit(self, work: Any) -> Future:
        return self.thread.submit(work)

    def end_all(self) -> None:
        """End all unfinished answers, on the event loop."""
        self.stopping = True
        for answer in list(self.open):
            answer.fail(HTTPException(503, STOPPING))

    def stop(self) -> None:
        """Stop after the queued requests. Conversations are saved if there is a folder."""
        self.submit(self.rows.end_all).result()
        self.submit(self.conversations.close).result()
