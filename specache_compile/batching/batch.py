"""`Batch(model)`: requests that join and leave at any step, each saying what it would say alone."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specache_compile.caches.rows import join, lengths, row_of
from specache_compile.compile.compiled_options import required_options
from specache_compile.errors import SpecacheError
from specache_compile.methods import METHODS
from specache_compile.methods.field import LayerShape
from specache_compile.runtime.regroup import session_behind

from .admission import Budget, needed, next_to_begin
from .request import End, Request, Stage, drawn, request_for

# Prompt tokens that are read between two steps of the others.
CHUNK = 512


class Batch:
    """Requests through one compiled model, on the thread that calls `step`.

        batch = sc.Batch(model, device_memory=2 << 30)
        first = batch.add(ids, max_new_tokens=100)
        second = batch.add(others, max_new_tokens=50, do_sample=True, temperature=0.7, seed=1)
        while batch.open:
            for request, token in batch.step(): ...
        first.said, first.end

    A step reads one chunk of one prompt, and has all rows say a token. What a request says depends on no other: its
    tiers, its positions, its processors and its random numbers are its own.

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
        """SpecacheError where this backend has not compiled the model, where the method's rows cannot differ, where a
        GPU's short caches stay in 16 bits (option min_context), and where the model takes no position_ids."""
        self.options = required_options(model, "Batch")
        if not METHODS[self.options.method].rows_differ:
            raise SpecacheError(f"Batch: method {self.options.method!r} keeps rows of one length alone; take specache")
        if self.options.min_context != 0 and model.device.type == "cuda":
            raise SpecacheError("Batch: rows that are still in 16 bits join no others: compile with min_context=0")
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise SpecacheError(f"Batch: {type(model).__name__} takes no position_ids, which rows have of their own")
        self.model, self.most_rows, self.chunk = model, rows, chunk
        self.budget = Budget(device_memory, host_memory)
        self.layers: list[LayerShape] = []  # known when a first prompt has been read
        self.waiting: list[Request] = []
        self.reading: list[Request] = []
        self.saying: list[Request] = []  # in the order of the cache's rows
        self.cache: DynamicCache | None = None

    @property
    def open(self) -> list[Request]:
        """The requests that are not over."""
        return [*self.saying, *self.reading, *self.waiting]

    def add(self, ids: Tensor, *, cache: DynamicCache | None = None, seed: int | None = None, **asked: Any) -> Request:
        """A new request: token ids, int64 [n] or [1, n].

        cache: held, of one row, with the first tokens of ids; all but the last at most. The request takes it over.
        seed: of its random numbers; None: another each time.
        asked: what `generate` takes about a text: max_new_tokens, which must be there, or generation_config; do_sample,
            temperature, top_p, eos_token_id, logits_processor.

        ValueError where an argument is none of these, SpecacheError where the budget would never hold the request.
        """
        prompt = ids.reshape(-1).cpu()
        read = 0 if cache is None else int(lengths(cache))
        if not read < len(prompt):
            raise ValueError(f"the prompt has {len(prompt)} tokens, of which {read} are cached: give one more at least")
        request = request_for(self.model, prompt, {**asked, "seed": seed}, cache, read)
        if cache is not None:
            self.layers = self.layers or list(session_behind(cache).layers)
        self.check_fits(request)
        self.waiting.append(request)
        return request

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
        was said, in no order. A request whose prompt fails is over, with its `error`; where the step of all rows fails,
        it raises, and can be taken again."""
        self.admit()
        said = self.say()
        if self.reading:
            said += self.read(self.reading[0])
        return said

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
        cache = request.cache
        if request in self.saying:
            assert self.cache is not None
            cache = row_of(self.cache, self.saying.index(request))
        self.remove(request)
        return cache

    def drop(self, request: Request) -> None:
        """Forget a request, and its row."""
        for requests in (self.waiting, self.reading):
            if request in requests:
                requests.remove(request)
        if request in self.saying:
            self.keep([other for other in self.saying if other is not request])

    def keep(self, requests: list[Request]) -> None:
        """Only these rows go on."""
        if len(requests) == len(self.saying):
            return
        rows = torch.tensor([self.saying.index(request) for request in requests], dtype=torch.int64)
        self.saying = requests
        if not requests:
            self.cache = None
        else:
            assert self.cache is not None
            self.cache.batch_select_indices(rows.to(self.model.device))

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
                self.layers = list(session_behind(request.cache).layers)
                self.check_fits(request)
            if request.read < len(request.prompt):
                return []
            token = drawn(request, logits)
            cache = request.cache if self.cache is None else join([self.cache, request.cache])
        except Exception as error:
            self.reading.remove(request)
            request.is_over(End.FAILED, error)
            return []
        self.reading.remove(request)
        self.cache, request.cache, request.stage = cache, None, Stage.SAYING
        self.saying.append(request)
        self.hear([(request, token)])
        return [(request, token)]

    def say(self) -> list[tuple[Request, int]]:
        """One token of each row."""
        if not self.saying:
            return []
        assert self.cache is not None
        tokens = torch.tensor([[request.said[-1]] for request in self.saying], device=self.model.device)
        self.cache, logits = self.ask(tokens, lengths(self.cache)[:, None], self.cache)
        said = [(request, drawn(request, logits[row : row + 1])) for row, request in enumerate(self.saying)]
        self.hear(said)
        return said

    def hear(self, said: list[tuple[Request, int]]) -> None:
        """Requests have said a token; the rows of those that are over leave."""
        for request, token in said:
            request.hear(token)
        self.keep([request for request in self.saying if request.stage is not Stage.OVER])

    def ask(self, tokens: Tensor, positions: Tensor, cache: DynamicCache | None) -> tuple[DynamicCache, Tensor]:
        """The cache behind new tokens [B, T], and the last ones' logits [B, V]."""
        last = {"logits_to_keep": 1} if self.model._supports_logits_to_keep() else {}
        out = self.model(
            input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, return_dict=True, **last
        )
        return out.past_key_values, out.logits[:, -1]
