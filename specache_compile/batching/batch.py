"""`Batch(model)`: requests that join and leave at any step, each saying what it would say alone."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specache_compile.caches.rows import join, reason_against, row_of
from specache_compile.compile.compiled_options import required_options
from specache_compile.errors import SpecacheError
from specache_compile.methods.field import LayerShape
from specache_compile.runtime.session import session_of

from .admission import Budget, needed, next_to_begin
from .request import End, Request, Stage, drawn, request_for

# Prompt tokens that are read between two steps of the others.
CHUNK = 512


@dataclass(eq=False)
class Rows:
    """Requests that say tokens together: a cache, and whose each of its rows is."""

    cache: DynamicCache
    requests: list[Request]

    def row(self, request: Request) -> DynamicCache:
        """The cache of one request alone."""
        return self.cache if len(self.requests) == 1 else row_of(self.cache, self.requests.index(request))

    def keep(self, requests: list[Request]) -> None:
        """Only these go on."""
        if 0 < len(requests) < len(self.requests):
            rows = [self.requests.index(request) for request in requests]
            self.cache.batch_select_indices(torch.tensor(rows))
        self.requests = requests


class Batch:
    """Requests through one compiled model, on the thread that calls `step`.

        batch = sc.Batch(model, device_memory=2 << 30)
        first = batch.add(ids, max_new_tokens=100)
        second = batch.add(others, max_new_tokens=50, do_sample=True, temperature=0.7, seed=1)
        while batch.open:
            for request, token in batch.step(): ...
        first.said, first.end

    A step reads one chunk of one prompt, and has all rows say a token. What a request says depends on no other: its
    tiers, its positions, its processors and its random numbers are its own. Rows that `join` refuses (sliding windows,
    methods that drop pairs) say their tokens one after another.

    rows: the most that say tokens together.
    chunk: prompt tokens that are read between two steps.
    device_memory, host_memory: bytes that tiers may have; None: as many as there are. A request begins where its bytes
        are free until its end. The tiers are a rectangle as long as the longest row, and a row that joins has them
        copied: rows of very different lengths take several times what their tokens do.
    """

    def __init__(
        self, model: Any, *, rows: int = 32, chunk: int = CHUNK, device_memory: int | None = None,
        host_memory: int | None = None,
    ) -> None:  # fmt: skip
        """SpecacheError where this backend has not compiled the model."""
        self.options = required_options(model, "Batch")
        # Rows of their own lengths have positions of their own.
        wrapped = getattr(model, "_orig_mod", model)
        self.joins = "position_ids" in inspect.signature(wrapped.forward).parameters
        self.model, self.most_rows, self.chunk = model, rows, chunk
        self.budget = Budget(device_memory, host_memory)
        self.layers: list[LayerShape] = []  # known when a first prompt has been read
        self.waiting: list[Request] = []
        self.reading: list[Request] = []
        self.groups: list[Rows] = []
        self.told: list[tuple[Request, int]] = []  # said in a step that has not returned

    @property
    def saying(self) -> list[Request]:
        """Those with a row."""
        return [request for group in self.groups for request in group.requests]

    @property
    def open(self) -> list[Request]:
        """The requests that are not over."""
        return [*self.saying, *self.reading, *self.waiting]

    def add(
        self, ids: Tensor, *, cache: DynamicCache | None = None, keep: bool = False, seed: int | None = None,
        logprobs: int | None = None, **asked: Any,
    ) -> Request:  # fmt: skip
        """A new request: token ids, int64 [n] or [1, n].

        cache: of one row, with the first tokens of ids; all but the last at most. The request takes it over.
        keep: when the request is over, its `cache` is that of its row alone.
        seed: of its random numbers; None: another each time.
        logprobs: tell in `request.logprobs` how likely each token was that it says, and so many of the likeliest.
        asked: what `generate` takes about a text: max_new_tokens, which must be there, or generation_config; do_sample,
            temperature, top_p, eos_token_id, logits_processor.

        ValueError where an argument is none of these, SpecacheError where the budget would never hold the request.
        """
        prompt = ids.reshape(-1).cpu()
        read = 0 if cache is None else cache.get_seq_length()
        if not read < len(prompt):
            raise ValueError(f"the prompt has {len(prompt)} tokens, of which {read} are cached: give one more at least")
        request = request_for(self.model, prompt, {**asked, "seed": seed}, cache, read)
        request.keeps, request.asks = keep, logprobs
        self.look_at(cache)
        self.check_fits(request)
        self.waiting.append(request)
        return request

    def look_at(self, cache: DynamicCache | None) -> None:
        """Learn from a first cache what a layer keeps."""
        session = None if cache is None else session_of(cache)
        if session is not None and not self.layers:
            self.layers = list(session.layers)

    def check_fits(self, request: Request) -> None:
        """SpecacheError where the budget would not hold a request alone."""
        alone = needed(self.options, self.layers, [request.longest])
        if not alone.fits(self.budget):
            raise SpecacheError(
                f"a request of {request.longest:,} tokens takes {alone.device:,} bytes on the device and "
                f"{alone.host:,} on the host, more than device_memory={self.budget.device} and "
                f"host_memory={self.budget.host} allow: ask for fewer tokens, or raise them"
            )

    @torch.no_grad()
    def step(self) -> list[tuple[Request, int]]:
        """Admit who fits, read a chunk of the oldest prompt that is being read, and have each row say a token: what
        was said, in no order but a request's own. A request whose prompt, or processor, fails is over, with its
        `error`. Where the model fails over rows, the step raises, and can be taken again: what others have said by then
        is among what the next one returns."""
        self.admit()
        for group in list(self.groups):
            self.told += self.say_together(group)
        if self.reading:
            self.told += self.read(self.reading[0])
        told, self.told = self.told, []
        return told

    def run(self) -> None:
        """Step until every request is over."""
        while self.open:
            self.step()

    def remove(self, request: Request) -> None:
        """End a request, wherever it is: its row is gone before the next step."""
        if request.stage is Stage.OVER:
            return
        self.drop(request)
        request.is_over(End.REMOVED)

    def take(self, request: Request) -> DynamicCache | None:
        """`remove`, and its cache as one of a row alone; None where nothing of it was read."""
        group = self.group_of(request)
        cache = request.cache if group is None else group.row(request)
        self.remove(request)
        return cache

    def group_of(self, request: Request) -> Rows | None:
        return next((group for group in self.groups if request in group.requests), None)

    def drop(self, request: Request) -> None:
        """Forget a request, and its row."""
        for requests in (self.waiting, self.reading):
            if request in requests:
                requests.remove(request)
        group = self.group_of(request)
        if group is not None:
            group.keep([other for other in group.requests if other is not request])
        self.groups = [group for group in self.groups if group.requests]

    def admit(self) -> None:
        """Let those begin that there is room for. The first of all begins alone: it tells what a layer keeps."""
        while self.waiting and len(self.reading) + len(self.saying) < self.most_rows:
            running = [*self.saying, *self.reading]
            if not self.layers:
                chosen = None if running else self.waiting[0]
            else:
                chosen = next_to_begin(self.waiting, running, self.budget, self.options, self.layers)
            if chosen is None:
                return
            self.waiting.remove(chosen)
            self.reading.append(chosen)
            chosen.stage = Stage.READING

    def read(self, request: Request) -> list[tuple[Request, int]]:
        """Read a chunk of a prompt; behind its last one the request has said a token, and is a row of the batch."""
        try:
            tokens = request.prompt[request.read : request.read + self.chunk].to(self.model.device)[None]
            positions = torch.arange(request.read, request.read + tokens.shape[1], device=tokens.device)[None]
            request.cache, logits = self.ask(tokens, positions, request.cache)
            request.read += tokens.shape[1]
            if not self.layers:
                self.look_at(request.cache)
                self.check_fits(request)
            if request.read < len(request.prompt):
                return []
            token = drawn(request, logits)
            group = self.joined(request.cache)
        except Exception as error:
            self.reading.remove(request)
            request.is_over(End.FAILED, error)
            return []
        self.reading.remove(request)
        request.cache, request.stage = None, Stage.SAYING
        group.requests.append(request)
        return self.heard(group, [(request, token)])

    def joined(self, cache: DynamicCache) -> Rows:
        """The rows that a cache of one row is now the last of."""
        for group in self.groups if self.joins else ():
            if reason_against([group.cache, cache]) is None:
                group.cache = join([group.cache, cache])
                return group
        self.groups.append(Rows(cache, []))
        return self.groups[-1]

    def say_together(self, group: Rows) -> list[tuple[Request, int]]:
        """One token of each row of a group."""
        device = self.model.device
        tokens = torch.tensor([[request.said[-1]] for request in group.requests], device=device)
        positions = torch.tensor([[len(request.prompt) + len(request.said) - 1] for request in group.requests])
        group.cache, logits = self.ask(tokens, positions.to(device), group.cache)
        said = []
        for row, request in enumerate(group.requests):
            try:
                said.append((request, drawn(request, logits[row : row + 1])))
            except Exception as error:  # of a processor: the row's alone
                request.is_over(End.FAILED, error)
        return self.heard(group, said)

    def heard(self, group: Rows, said: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Requests of a group have said these tokens; the rows of those that are over leave."""
        for request, token in said:
            request.hear(token)
            if request.stage is Stage.OVER and request.keeps:
                request.cache = group.row(request)
        group.keep([request for request in group.requests if request.stage is not Stage.OVER])
        self.groups = [group for group in self.groups if group.requests]
        return said

    def ask(self, tokens: Tensor, positions: Tensor, cache: DynamicCache | None) -> tuple[DynamicCache, Tensor]:
        """The cache behind new tokens [B, T], and the last ones' logits [B, V]."""
        more: dict[str, Any] = {"logits_to_keep": 1} if self.model._supports_logits_to_keep() else {}
        if self.joins:
            more["position_ids"] = positions
        out = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, return_dict=True, **more)
        return out.past_key_values, out.logits[:, -1]
