"""Answers that are generated together: each is a row of one batch, on its conversation's cache."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import DynamicCache

from specache_compile.batching.batch import Batch
from specache_compile.batching.request import Request, Stage
from specache_compile.runtime.records import Statistics
from specache_compile.runtime.session import session_of

from .answer import Answer, ClientLeft, Stopped
from .conversation import Conversation
from .interface.questions import processors_of

log = logging.getLogger(__name__)

# An answer and its conversation.
AnswerRow = tuple[Answer, Conversation]


class AnswerRows:
    """The running answers, all on the model's thread; a turn is a step of the batch.

    begin: an answer → its conversation, which is taken.
    keep: called with (conversation, answer) when an answer ends.
    ended: called last with each answer.
    memory: arguments of the `Batch`.
    arrived: answers that wait for a row.
    """

    def __init__(
        self, model: Any, most: int, begin: Callable[[Answer], Conversation],
        keep: Callable[[Conversation, Answer], None], ended: Callable[[Answer], None], memory: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.batch, self.most = Batch(model, rows=most, **memory), most
        self.begin, self.keep, self.ended = begin, keep, ended
        self.arrived: deque[Answer] = deque()
        self.running: dict[Request, AnswerRow] = {}

    @property
    def busy(self) -> bool:
        return bool(self.arrived or self.running)

    def turn(self) -> None:
        """End answers whose clients have left, start new ones, and generate a token for each."""
        for request in [request for request, (answer, _) in self.running.items() if answer.ticket.left.is_set()]:
            self.end(request, self.batch.take(request))
        while self.arrived and len(self.running) < self.most:
            self.start(self.arrived.popleft())
        for request, token in self.stepped():
            if request in self.running:  # its answer may have stopped at the token before
                self.deliver(request, token)
        for request in [request for request in self.running if request.stage is Stage.FINISHED]:
            self.end(request, request.cache, request.error)

    def start(self, answer: Answer) -> None:
        if answer.ticket.left.is_set():
            self.ended(answer)
            return
        try:
            conversation = self.begin(answer)
        except Exception as error:
            answer.fail(error)
            self.ended(answer)
            return
        try:
            request = self.request_for(answer, conversation)
        except Exception as error:  # nothing was cached, so the conversation is unchanged
            self.keep(conversation, answer)
            if not isinstance(error, ClientLeft):
                answer.fail(error)
            self.ended(answer)
        else:
            self.running[request] = (answer, conversation)

    def request_for(self, answer: Answer, conversation: Conversation) -> Request:
        """Add the answer's request to the batch, on its conversation's cache."""
        ids, question = answer.question.inputs["input_ids"], answer.question
        answer.put(ids)
        return self.batch.add(
            ids, cache=conversation.cache if len(conversation.ids) else None, keep=True, seed=question.seed,
            generation_config=question.config, logits_processor=processors_of(question), logprobs=question.logprobs,
        )  # fmt: skip

    def stepped(self) -> list[tuple[Request, int]]:
        """The tokens of a step. A failed step is repeated, since memory may be free the next time. A request that fails
        twice is finished by then; no other one is."""
        for _ in range(2 * len(self.running)):
            try:
                return self.batch.step()
            except Exception:
                log.warning("a step failed and is repeated", exc_info=True)
        return self.batch.step()

    def fail_all(self, error: Exception) -> None:
        """End every running answer with an error."""
        for request, (answer, _) in list(self.running.items()):
            answer.fail(error)
            self.forget(request)
            try:
                self.batch.remove(request)
            except Exception:  # the device may be lost, and the answer has ended anyway
                log.exception("a row could not be removed")

    def deliver(self, request: Request, token: int) -> None:
        answer, _ = self.running[request]
        try:
            if request.logprobs:
                answer.note(token, request.logprobs[answer.generated])
            answer.put(torch.tensor([token]))
        except (Stopped, ClientLeft):
            self.end(request, self.batch.take(request))
        except Exception as error:
            self.end(request, self.batch.take(request), error)

    def end(self, request: Request, cache: DynamicCache | None, error: Exception | None = None) -> None:
        """End an answer, and keep the row's cache, if any, in its conversation."""
        answer, conversation = self.running[request]
        try:
            if error is not None:
                raise error
            if cache is not None:
                conversation.cache = cache
                self.keep(conversation, answer)
        except Exception as failed:
            answer.fail(failed)
        else:
            answer.close()
        finally:
            self.forget(request)

    def forget(self, request: Request) -> None:
        self.ended(self.running.pop(request)[0])

    def end_all(self) -> None:
        """Keep what every row has cached, and end. Preempted requests are not kept: there was no room for them."""
        self.arrived.clear()
        for request in list(self.running):
            if request.swapped is not None:
                self.batch.remove(request)
            self.end(request, self.batch.take(request))

    def statistics(self) -> list[Statistics]:
        """The counts of every session that a step has used."""
        caches = [*(group.cache for group in self.batch.groups), *(request.cache for request in self.batch.prefilling)]
        sessions = (session_of(cache) for cache in caches if cache is not None)
        return [session.statistics for session in sessions if session is not None]
