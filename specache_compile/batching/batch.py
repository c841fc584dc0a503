"""`Batch(model)`: requests that start and end at any step, each with the tokens that it would have alone."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specache_compile.caches.joining import append_rows, drop, keep_rows, reason_against, reserve_cache_rows, row_of
from specache_compile.compat import cache_of, with_cache
from specache_compile.compile.compiled_options import required_options
from specache_compile.errors import SpecacheError

from .batch_memory import BatchMemory, Bytes, Running
from .batch_rope import BatchRope
from .prefixes import can_crop
from .request import End, Request, Stage, append_next, request_for
from .spill import SpillFolder, load, remove
from .twice import FailedTwice, twice

# Prompt tokens to prefill between two decode steps.
CHUNK = 512


@dataclass(eq=False)
class RowGroup:
    """Requests that decode together: one cache, with a row for each request.

    paged: the cache's tokens are in the batch's pages; else it has one row. A paged cache without rows is kept, with
        its memory and recorded steps, for the next requests.
    """

    cache: DynamicCache
    requests: list[Request]
    paged: bool

    def row(self, request: Request) -> DynamicCache:
        """The cache of one request's row."""
        return row_of(self.cache, self.requests.index(request)) if self.paged else self.cache

    def keep_only(self, requests: list[Request]) -> bool:
        """Keep only these requests; whether the cache can still be used. The last row moves into the place of a row
        that leaves; no other row moves."""
        if len(requests) == len(self.requests):
            return True
        kept = [row for row, request in enumerate(self.requests) if request in requests]
        last = [row for row in kept if row >= len(kept)]
        rows = [row if row in kept else last.pop() for row in range(len(kept))]
        usable = self.paged and keep_rows(self.cache, rows)
        self.requests = [self.requests[row] for row in rows]
        return usable


class Batch:
    """Generate for many requests at once, with one compiled model and without a server.

    A step prefills one chunk of one prompt, and generates a token for every running request. A request's tokens do not
    depend on other requests. Models whose rows cannot be joined (sliding windows, methods that drop pairs) decode one
    row after another.

    Running requests keep their tokens in pages of 256, and share the pages of common prompt prefixes (`prefixes.py`). A
    batch belongs to the thread that calls `step`.

    Args:
        model: a decoder that was compiled with this backend.
        rows: most requests that decode together.
        chunk: prompt tokens to prefill between two decode steps.
        device_memory, host_memory: most bytes of the tiers; None is unbounded. A request starts when all of its
            bytes, up to its last token, are free. On a CPU without device_memory, host_memory is the budget of all
            tiers.
        sessions: most finished requests whose caches are kept, the most recently used ones. A prompt that begins with
            tokens of one computes only the others. With a lossy setting it may differ from a prompt alone.
        spill_folder: a request is then admitted when its prompt fits, with one spare page for each running request. If
            pages run out, the newest request is preempted: its cache is written to this folder and resumed later, bit
            for bit. Evicted sessions are written there too. The batch deletes its files at its end.
        spill_bytes: most bytes of evicted sessions in that folder; None is unbounded.

    Raises:
        SpecacheError: the model is not compiled with this backend, its options verify drafts, or the folder cannot be
            written.

    Example:
        import specache_compile as sc

        model, tokenizer = sc.load_model("examples/needle-llama")
        model.compile(backend="specache")
        batch = sc.Batch(model, host_memory=2 << 30)
        first = batch.add(tokenizer("Hello").input_ids, max_new_tokens=8)
        second = batch.add(tokenizer("World").input_ids, max_new_tokens=4, do_sample=True, temperature=0.7, seed=1)
        while batch.open:
            for request, token in batch.step():
                print("first" if request is first else "second", token)
        print(tokenizer.decode(first.generated), second.end)
    """

    def __init__(
        self, model: Any, *, rows: int = 32, chunk: int = CHUNK, device_memory: int | None = None,
        host_memory: int | None = None, sessions: int = 0, spill_folder: Path | None = None,
        spill_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self.options = required_options(model, "Batch")
        if self.options.drafts:
            raise verifies_nothing()
        # Rows of different lengths require position_ids.
        wrapped = getattr(model, "_orig_mod", model)
        self.joins = "position_ids" in inspect.signature(wrapped.forward).parameters
        self.model, self.most_rows, self.chunk = model, rows, chunk
        self.rope = BatchRope(wrapped)
        budget = Bytes(device_memory, host_memory)
        self.spill, self.started = None if spill_folder is None else SpillFolder(spill_folder), 0
        self.memory = BatchMemory(self.options, budget, rows, chunk, sessions, self.spill, spill_bytes)
        self.waiting: list[Request] = []
        self.prefilling: list[Request] = []
        self.groups: list[RowGroup] = []
        self.requests: list[Request] = []  # open ones, and finished ones with tokens that no step has returned
        self.returned: dict[Request, int] = {}  # tokens that steps have returned
        self.unfinished = False  # the last step did not return

    @property
    def decoding(self) -> list[Request]:
        """The requests that decode."""
        return [request for group in self.groups for request in group.requests]

    @property
    def open(self) -> list[Request]:
        """The requests that are not finished."""
        return [request for request in self.requests if request.stage is not Stage.FINISHED]

    def add(
        self, ids: Tensor | Sequence[int], *, seed: int | None = None, logprobs: int | None = None, **arguments: Any
    ) -> Request:
        """Add a request.

        Args:
            ids: token ids of one prompt: a list of ints, or int64 [n] or [1, n].
            seed: of its random numbers; None is a different one each time.
            logprobs: report in `request.logprobs` the log-probability of each token, and this many of the likeliest.
            arguments: generation settings as for `generate`: max_new_tokens (required) or generation_config, do_sample,
                temperature, top_p, eos_token_id, logits_processor.

        Returns:
            The `Request`; `step` updates its fields.

        Raises:
            ValueError: an argument is unknown or unsupported.
            SpecacheError: the memory budget could never hold the request.
        """
        prompt = token_ids(ids)
        if not len(prompt):
            raise ValueError("the prompt has 0 tokens: pass at least one")
        request = request_for(self.model, prompt, {**arguments, "seed": seed})
        request.top_logprobs = logprobs
        self.rope.prepare(request)
        if (error := self.memory.error_alone(request)) is not None:
            raise error
        self.requests.append(request)  # the next step queues it, so an interrupt here leaves the batch consistent
        return request

    def step(self) -> list[tuple[Request, int]]:
        """Run one step, and return the generated tokens as (request, token).

        A step admits waiting requests, prefills one chunk of one prompt, and decodes a token for each running request.
        A request whose logits processor fails is finished, with its `error`.

        If the model fails or an interrupt (Ctrl-C) ends a step, `step` raises, and can be called again. The next step
        prefills all open requests again, decodes their known tokens again, and returns the tokens that the interrupted
        step could not. A request for which the model fails twice at the same token, alone, is finished with its
        `error`.
        """
        self.recover()
        self.unfinished = True
        self.run_step()
        new_tokens = [
            (request, token)
            for request in self.requests
            for token in request.generated[self.returned.get(request, 0) :]
        ]
        returned = {request: len(request.generated) for request in self.requests}
        self.returned, self.unfinished = returned, False  # no call follows, so no signal handler runs in between
        return new_tokens

    @torch.no_grad()
    def run_step(self) -> None:
        unreturned = {one for one in self.requests if len(one.generated) > self.returned.get(one, 0)}
        self.requests = [one for one in self.requests if one.stage is not Stage.FINISHED or one in unreturned]
        queued = set(self.waiting)
        self.waiting += [one for one in self.requests if one.stage is Stage.WAITING and one not in queued]
        self.admit()
        self.preempt()
        self.memory.notice_before_step(self.model, bool(self.prefilling or (self.decoding and self.memory.sessions)))
        for group in list(self.groups):
            self.prefill_again(group)
            if group.requests:
                self.decode_group(group)
        if self.prefilling:
            self.prefill(self.prefilling[0])
        if not self.running:
            self.memory.watch = None  # it would keep replaced weights alive

    def prefill_again(self, group: RowGroup) -> None:
        """Move rows back to the queue, for a new prefill, when their length reaches the switch of the model's RoPE."""
        for request in [one for one in group.requests if self.rope.changes(one)]:
            self.drop(request)
            request.resumed = request.reached
            self.restart(request)
            self.waiting.insert(0, request)

    def recover(self) -> None:
        """After a step that did not return, rebuild the state from the requests: only they are sure to be complete."""
        if not self.unfinished:
            return
        self.memory.restart([*(group.cache for group in self.groups), *(request.cache for request in self.open)])
        self.groups, self.prefilling = [], []
        for request in self.open:
            self.restart(request)
        self.waiting = sorted(self.open, key=lambda request: (not request.generated, request.started))

    def restart(self, request: Request) -> None:
        """Make an open request without a row wait for a new prefill."""
        drop_swapped(request)
        request.restart()
        request.whole = self.rope.needs_whole_prefill(request)

    def run(self) -> None:
        """Step until every request is finished."""
        while self.open:
            self.step()

    def remove(self, request: Request) -> None:
        """End a request in any stage; it has no row in the next step. With sessions its cache is kept, unless the
        request is preempted. It has ended even if `remove` raises."""
        try:
            self.recover()
            self.unfinished = True
            if request.stage is not Stage.FINISHED:
                self.keep(request)
                self.drop(request)
                self.finish(request, End.REMOVED)
        except BaseException:  # the next call recovers without the request
            drop_swapped(request)
            request.finish(request.end or End.REMOVED, request.error)
            raise
        self.unfinished = False

    def forget_prefixes(self) -> None:
        """Drop the cached prefixes and sessions.

        A batch does so itself when it sees that the model's weights or settings have changed. It samples the weights
        when a request starts, and one value of each weight before each step whose pairs it may keep. Call this after
        writes through `.data` or numpy that change only a few values. Running requests continue with their caches.
        """
        self.memory.forget_prefixes()

    def finish(self, request: Request, end: End, error: Exception | None = None) -> None:
        """Finish a request that has no row."""
        drop_swapped(request)
        self.release(request)
        request.finish(end, error)

    def release(self, request: Request) -> None:
        """Free the cache of a request that has no row."""
        if request.cache is not None:
            drop(request.cache)
        request.cache = None

    def keep(self, request: Request) -> None:
        """With sessions, keep what a request has cached."""
        group = self.group_of(request)
        cache = request.cache if group is None else group.cache
        if self.memory.sessions and cache is not None and request.end is not End.FAILED:
            copied = functools.partial(copy.deepcopy, cache) if group is None else functools.partial(group.row, request)
            self.memory.keep(request, copied, can_crop(cache))

    def group_of(self, request: Request) -> RowGroup | None:
        return next((group for group in self.groups if request in group.requests), None)

    def drop(self, request: Request) -> None:
        """Remove a request from the queues, and its row from its group."""
        for requests in (self.waiting, self.prefilling):
            if request in requests:
                requests.remove(request)
        group = self.group_of(request)
        if group is not None:
            self.keep_only(group, [other for other in group.requests if other is not request])

    def keep_only(self, group: RowGroup, requests: list[Request]) -> None:
        """Keep only these requests of a group. One group without requests stays."""
        usable = group.keep_only(requests)
        if not requests and not (usable and all(other.requests for other in self.groups if other is not group)):
            self.discard(group)

    def discard(self, group: RowGroup) -> None:
        """Forget a group without requests. A cache that is not in pages may be a session by now."""
        self.groups.remove(group)
        if group.paged:
            drop(group.cache)

    def admit(self) -> None:
        """Start waiting requests in their order, while they fit. The very first starts alone, because it shows the
        shapes of the layers. During a prefill only preempted ones start: prompts are prefilled one at a time."""
        while len(self.prefilling) + len(self.decoding) < self.most_rows:
            first = next((one for one in self.waiting if not self.prefilling or one.swapped is not None), None)
            if first is None:
                return
            if not self.memory.fits(first, self.running):
                if self.running or self.fits_alone(first):
                    return
            elif not self.memory.notice_weights(self.model):  # else it is checked again, without the prefixes
                self.start(first)

    def start(self, request: Request) -> None:
        """Start or resume a request. A preempted one whose cache cannot be read starts from its prompt."""
        request.started, self.started = self.started, self.started + 1
        if not self.fits_alone(request):
            return
        with self.attempt([request]):
            if request.swapped is not None:
                cache = load(request.swapped, self.model)
                if cache is None:
                    self.restart(request)
                else:
                    request.cache = self.memory.paged_or_same(cache)
            if request.prefilled == len(request.text):
                self.start_decoding(request)
            else:
                if request.cache is None:
                    self.memory.attach_prefix(request, self.model)
                self.prefilling.append(request)
                request.stage = Stage.PREFILL
        self.waiting.remove(request)
        drop_swapped(request)

    def fits_alone(self, request: Request) -> bool:
        """Whether the memory budget could hold a request alone; if not, the request is failed."""
        error = self.memory.error_alone(request)
        if error is not None:
            self.drop(request)
            self.finish(request, End.FAILED, error)
        return error is None

    def start_decoding(self, request: Request) -> RowGroup:
        """Turn a prefilled request into a row."""
        assert request.cache is not None
        group = self.join_group(request, request.cache)
        request.cache, request.stage = None, Stage.DECODE
        group.requests.append(request)
        return group

    def preempt(self) -> None:
        """If pages for the next step are missing, drop prefixes, and swap out the request that started last."""
        while self.memory.pool is not None and not self.memory.has(self.next_pages) and self.spill is not None:
            paged = [one for one, cache, _ in self.running if one in self.prefilling or self.memory.tiers_of(cache)]
            self.swap_out(max(paged, key=lambda request: request.started), self.spill)

    def next_pages(self) -> int:
        """Pages that the next step allocates."""
        steps = [(one, self.next_tokens(one[0])) for one in self.running]
        return sum(self.memory.pages_needed(*one, one[0].cached + tokens) for one, tokens in steps)

    def next_tokens(self, request: Request) -> int:
        """Tokens that the next step caches for a running request."""
        if request.stage is Stage.DECODE:
            return 1
        left = self.rope.until_switch(request)
        return left if request.whole else min(self.chunk, left)

    def swap_out(self, request: Request, spill: SpillFolder) -> None:
        """Swap a request out, and queue it before all requests that have not started. If its cache cannot be written,
        the request starts from its prompt later."""
        group = self.group_of(request)
        with contextlib.suppress(FailedTwice):
            if group is not None:
                request.cache = twice(functools.partial(group.row, request))
        request.swapped = None if request.cache is None else spill.put(request.cache)
        self.drop(request)
        self.release(request)
        request.stage = Stage.WAITING
        if request.swapped is None:
            self.restart(request)
        self.waiting.insert(0, request)

    @property
    def running(self) -> list[Running]:
        rows = [(request, group.cache, row) for group in self.groups for row, request in enumerate(group.requests)]
        return [*rows, *((request, request.cache, 0) for request in self.prefilling)]

    def prefill(self, request: Request) -> None:
        """Prefill one chunk of a prompt. After the last chunk the request has its first token, and becomes a row."""
        with self.attempt([request]):
            text = request.text
            tokens = text[request.prefilled : request.prefilled + self.next_tokens(request)].to(self.model.device)[None]
            positions = torch.arange(request.prefilled, request.prefilled + tokens.shape[1], device=tokens.device)[None]
            cache, logits = self.call_model(tokens, positions, request.cache)
            request.cache, request.prefilled = cache, request.prefilled + tokens.shape[1]
            if not self.memory.layers:
                self.memory.set_layers(cache, self.joins)
                if not self.fits_alone(request):
                    return
            request.cache = self.memory.paged_or_same(cache)
            self.memory.keep_prefill(request)
            if request.prefilled < len(text):
                return
            group = self.start_decoding(request)
        self.prefilling.remove(request)
        append_next(request, logits[0, -1:])
        self.release_finished(group)

    def join_group(self, request: Request, cache: DynamicCache) -> RowGroup:
        """Append a request's cache of one row to a group; return the group."""
        paged = self.memory.tiers_of(cache) is not None
        for group in sorted(self.groups, key=lambda group: not group.requests) if paged else ():
            apart = group.requests and (request.alone or any(one.alone for one in group.requests))
            if group.paged and not apart and reason_against([group.cache, cache]) is None:
                group.cache = append_rows(group.cache, cache)
                return group
        for group in [other for other in self.groups if paged and not other.requests]:
            self.discard(group)  # its weights have been replaced
        if paged and not any(group.paged for group in self.groups):
            cache = reserve_cache_rows(cache, self.most_rows)
        self.groups.append(RowGroup(cache, [], paged))
        return self.groups[-1]

    def decode_group(self, group: RowGroup) -> None:
        """Decode one token of each row."""
        device = self.model.device
        tokens = torch.tensor([[one.generated[one.reached - 1]] for one in group.requests], device=device)
        positions = torch.tensor([[one.cached] for one in group.requests], device=device)
        with self.attempt(group.requests):
            group.cache, logits = self.call_model(tokens, positions, group.cache)
        for request, row in zip(group.requests, logits, strict=True):
            append_next(request, row[-1:])
        self.release_finished(group)

    @contextlib.contextmanager
    def attempt(self, requests: Sequence[Request]) -> Iterator[None]:
        """Run a block for these requests. If it raises, they restart alone; a request whose block raises twice at the
        same token is failed."""
        places = [(request, (request.stage, request.cached)) for request in requests]
        try:
            yield
        except Exception as error:
            for request, place in places:
                if place in request.failures:
                    self.finish(request, End.FAILED, error)
                request.failures.add(place)
                request.alone = True
            raise
        for request, place in places:
            request.failures.discard(place)

    def release_finished(self, group: RowGroup) -> None:
        """Remove the rows of finished requests, and keep their caches with sessions."""
        for request in group.requests:
            if request.stage is Stage.FINISHED:
                self.keep(request)
        self.keep_only(group, [request for request in group.requests if request.stage is not Stage.FINISHED])

    def call_model(self, tokens: Tensor, positions: Tensor, cache: DynamicCache | None) -> tuple[DynamicCache, Tensor]:
        """Run the model on new tokens [B, T]. Returns the cache and the last token's logits [B, 1, V]; those of all
        tokens if the model has no logits_to_keep."""
        more: dict[str, Any] = {"logits_to_keep": 1} if self.model._supports_logits_to_keep() else {}
        if self.joins:
            more["position_ids"] = positions
        if cache is None and self.model._supports_default_dynamic_cache():
            # as in `generate`, so that both run one graph
            cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        out = self.model(input_ids=tokens, **with_cache(cache), use_cache=True, return_dict=True, **more)
        return cache_of(out), out.logits


def verifies_nothing() -> SpecacheError:
    return SpecacheError(
        "option verify: a batch does not verify drafts. Compile with method='offload', whose tokens are exact too, or "
        "call generate for one sequence"
    )


def token_ids(ids: Tensor | Sequence[int]) -> Tensor:
    """Convert the token ids of one prompt to int64 [n]. ValueError if they are no ids, or several prompts."""
    given = torch.as_tensor(ids).cpu()
    if given.numel() and (given.is_floating_point() or given.dtype == torch.bool):
        raise ValueError(f"the prompt is {given.dtype}: pass token ids, which are integers")
    if given.dim() > 1 and given.numel() != given.shape[-1]:
        raise ValueError(f"the prompt has shape {[*given.shape]}: add each row as a request of its own")
    return given.reshape(-1).to(torch.int64)


def drop_swapped(request: Request) -> None:
    """Delete a request's swapped cache."""
    remove(request.swapped)
    request.swapped = None
