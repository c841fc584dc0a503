"""Runs requests through the model, as rows of one batch."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from fastapi import HTTPException
from transformers.cli.serving.utils import InferenceThread

from specache_compile.batching.batch import Batch
from specache_compile.batching.request import Request, Stage
from specache_compile.errors import RequestError

from .answer import Answer, Question
from .metrics import Metrics

log = logging.getLogger(__name__)

# Most tokens of an answer whose request sets no limit.
ANSWER = 1024
STOPPING = "the server is stopping. Send the request again later"


class Generation:
    """The answers of one model and its thread. It is a single thread, since recorded steps belong to one.

    open: answers that are not finished.
    running: those that the batch has, by their requests.
    """

    def __init__(self, tokenizer: Any, batch: Batch, metrics: Metrics, longest: int, queue: int) -> None:
        self.tokenizer, self.batch, self.metrics = tokenizer, batch, metrics
        self.longest, self.queue = longest, queue
        self.thread = InferenceThread()
        self.open: set[Answer] = set()
        self.running: dict[Request, Answer] = {}
        self.stopping = False
        prefixes = batch.memory.prefixes
        metrics.queue.set_function(self.queued)
        metrics.running.set_function(lambda: sum(answer.started for answer in list(self.open)))
        metrics.sessions.labels("memory").set_function(lambda: len(prefixes.in_memory))
        metrics.sessions.labels("disk").set_function(lambda: len(prefixes.kept) - len(prefixes.in_memory))
        for place in ("disk", "nowhere"):
            metrics.evicted.labels(place).set_function(partial(prefixes.evicted.__getitem__, place))

    def warm_up(self) -> None:
        """Compile for prompts of two tokens or more, of one and two chunks, and for one and two rows.

        Raises the error of a failed request. A prompt for which the memory budget has no room is left out.
        """
        self.thread.submit(self.compile).result()

    def compile(self) -> None:
        lengths = min(self.batch.chunk + 2, self.longest - 3), 2
        requests = [
            self.batch.add([0] * length, max_new_tokens=3, do_sample=False, eos_token_id=None) for length in lengths
        ]
        self.batch.run()
        self.batch.forget_prefixes()
        for request in requests:
            if request.error is not None and not isinstance(request.error, RequestError):
                raise request.error

    def queued(self) -> int:
        return sum(not answer.started and not answer.left.is_set() for answer in list(self.open))

    def begin(self, question: Question) -> Answer:
        """Queue a request and return its answer. HTTPException if it is too long, or too many are waiting."""
        config, prompt = question.config, len(question.ids)
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
        most = min(ANSWER, room, self.batch.switch.longest_from(prompt) - prompt)
        config.max_new_tokens = config.max_new_tokens or max(least, int(most))
        answer = Answer(question, self.tokenizer, self.metrics)
        self.open.add(answer)
        self.thread.submit(self.add, answer)
        return answer

    def add(self, answer: Answer) -> None:
        """Add an answer's request to the batch."""
        question = answer.question
        try:
            request = self.batch.add(
                question.ids, seed=question.seed, generation_config=question.config,
                logits_processor=question.processors,
            )  # fmt: skip
        except Exception as error:
            self.close(answer, error)
        else:
            self.running[request] = answer
            if len(self.running) == 1:
                self.thread.submit(self.turn)

    def turn(self) -> None:
        """Run a step, and submit the next turn, so that other work of the thread runs between steps."""
        try:
            self.step()
        except Exception as error:
            log.exception("a turn failed: all running answers end with its error")
            self.end_running(error)
        if self.running:
            self.thread.submit(self.turn)

    def step(self) -> None:
        """End answers whose clients have left, and generate a token for each other one."""
        for request in [request for request, answer in self.running.items() if answer.left.is_set()]:
            self.end(request)
        tokens = self.batch.step()
        for request, answer in self.running.items():
            if not answer.started and request.stage is not Stage.WAITING:
                answer.started, answer.reused = True, request.reused
                self.metrics.prompt_tokens.labels("reused").inc(request.reused)
                self.metrics.prompt_tokens.labels("computed").inc(len(request.prompt) - request.reused)
        for request, token in tokens:
            if request in self.running:  # its answer may have stopped at the token before
                self.deliver(request, token)
        for request in [request for request in self.running if request.stage is Stage.FINISHED]:
            self.end(request, request.error)

    def deliver(self, request: Request, token: int) -> None:
        try:
            if self.running[request].put(token):
                self.end(request)
        except Exception as error:
            self.end(request, error)

    def end(self, request: Request, error: Exception | None = None) -> None:
        """End an answer; the batch keeps what is cached."""
        answer = self.running.pop(request)
        try:
            self.batch.remove(request)
        except Exception as failed:  # the device may be lost
            log.exception("a row could not be removed")
            error = error or failed
        self.close(answer, error)

    def close(self, answer: Answer, error: Exception | None = None) -> None:
        self.open.discard(answer)
        answer.end(error)

    def end_running(self, error: Exception | None = None) -> None:
        for request in list(self.running):
            self.end(request, error)

    def end_all(self) -> None:
        """End all unfinished answers, on the event loop."""
        self.stopping = True
        for answer in list(self.open):
            answer.end(HTTPException(503, STOPPING))

    def stop(self) -> None:
        """Stop after the queued requests, and delete the spilled caches."""
        self.batch.memory.sessions = 0  # else ended requests would be kept, and older sessions be written to disk
        self.thread.submit(self.end_running).result()
        if self.batch.spill is not None:
            self.batch.spill.close()
