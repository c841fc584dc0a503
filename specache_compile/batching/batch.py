"""`Batch(model)`: requests that start and end at any step, each with the tokens that it would have alone."""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specache_compile.caches.joining import (
    append_rows,
    crop_rows,
    drop,
    empty_places,
    keep_rows,
    place_for,
    reason_against,
    row_of,
)  # fmt: skip
from specache_compile.compat import cache_of, with_cache
from specache_compile.compile.compiled_options import required_options
from specache_compile.errors import SpecacheError
from specache_compile.generate.drafts import rewritten_so_far, warn_not_drafted
from specache_compile.generate.verify import check_windows
from specache_compile.runtime.session import Session, sessions_of

from .admission import next_to_start
from .batch_memory import BatchMemory, Bytes, Running
from .batch_rope import BatchRope
from .request import End, Request, Stage, request_for
from .row_drafts import (
    decoded_for,
    drafting_session,
    fed,
    looked_up_for,
    most_drafted,
    note_round,
    reason_not_to_draft,
    say,
    verifying,
)
from .swapping import SwapFolder, drop_swapped, load_swapped, swapped_in_or_none
from .twice import FailedTwice, twice

# Prompt tokens that are read between two steps of the others.
CHUNK = 512


@dataclass(eq=False)
class RowGroup:
    """Requests that say tokens together: a cache, and whose each of its rows is.

    paged: it is in the batch's pages; else it has one row.
    """

    cache: DynamicCache
    requests: list[Request]
    paged: bool

    def row(self, request: Request) -> DynamicCache:
        """The cache of one request alone."""
        self.crop()
        return row_of(self.cache, self.requests.index(request)) if self.paged else self.cache

    def crop(self) -> None:
        """Take back what was drafted and not said, of a round too that failed half way. A row that failed leaves as it
        is."""
        session = drafting_session(self.cache)
        if session is not None and len(sessions_of(self.cache)) == 1:
            there = zip(self.requests, session.progress.lengths, strict=True)
            crop_rows(self.cache, [length if one.end is End.FAILED else one.cached for one, length in there])

    def keep(self, requests: list[Request]) -> None:
        """Only these go on. The last row takes the place of one that has left, so that no other is moved."""
        if len(requests) == len(self.requests):
            return
        rows = list(range(len(self.requests)))
        place = 0
        while place < len(rows):
            if self.requests[rows[place]] in requests:
                place += 1
            else:
                rows[place] = rows[-1]
                rows.pop()
        if rows:
            keep_rows(self.cache, rows)
        self.requests = [self.requests[row] for row in rows]


class Batch:
    """Generate for many requests at once, with one compiled model and without a server.

    A step prefills one chunk of one prompt, and generates a token for every running request. A request's tokens do not
    depend on other requests. Models whose rows cannot be joined (sliding windows, methods that drop pairs) decode one
    row after another. With `verify` or `lookup` one call of the model verifies the drafts of all rows, and a step may
    generate several tokens for each.

    Running requests keep their tokens in pages of 256, and share the pages of common prompt prefixes (`prefixes.py`). A
    batch belongs to the thread that calls `step`.

    Args:
        model: a decoder that was compiled with this backend.
        rows: most requests that decode together.
        chunk: prompt tokens to prefill between two decode steps.
        device_memory, host_memory: most bytes of the tiers; None is unbounded. A request starts when all of its bytes, up
            to its last token, are free. On a CPU without device_memory, host_memory is the budget of all tiers.
        kept: caches that the caller holds at a time, of finished requests (`keep`) or for waiting ones (`cache`).
            The memory budget counts this many.
        give_up: called when a request waits for pages: drops one of the caches that the caller holds, and returns whether
            there was one.
        overcommit: a folder. A request is then admitted when its prompt fits, with one spare page for each running
            request. If pages run out, the newest request is preempted: its cache is swapped to this folder and resumed
            later, bit for bit.

    Raises:
        SpecacheError: the model is not compiled with this backend, `overcommit` has no memory budget, or the model's
            sliding windows cannot drop rejected tokens.

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
        host_memory: int | None = None, kept: int = 0, give_up: Callable[[], bool] = lambda: False,
        overcommit: Path | None = None,
    ) -> None:  # fmt: skip
        self.options = required_options(model, "Batch")
        # RowGroup of their own lengths have positions of their own.
        wrapped = getattr(model, "_orig_mod", model)
        if self.options.drafts:
            check_windows(DynamicCache(config=wrapped.config))
        self.joins = "position_ids" in inspect.signature(wrapped.forward).parameters
        self.model, self.most_rows, self.chunk = model, rows, chunk
        self.rope = BatchRope(wrapped)
        budget = Bytes(device_memory, host_memory)
        self.memory = BatchMemory(self.options, budget, rows, chunk, kept, give_up, overcommit is not None)
        if overcommit is not None and budget == Bytes() and self.options.host_memory is None:
            raise no_budget()
        self.aside, self.begun = None if overcommit is None else SwapFolder(overcommit), 0
        self.waiting: list[Request] = []
        self.prefilling: list[Request] = []
        self.groups: list[RowGroup] = []
        self.places: DynamicCache | None = None  # where rows in pages were, until all of them had left
        self.requests: list[Request] = []  # those that are open, or have tokens that no step has returned
        self.returned: dict[Request, int] = {}  # tokens of each that steps have returned
        self.unfinished = False  # the newest step did not return

    @property
    def decoding(self) -> list[Request]:
        """The requests that decode."""
        return [request for group in self.groups for request in group.requests]

    @property
    def open(self) -> list[Request]:
        """The requests that are not finished."""
        return [request for request in self.requests if request.stage is not Stage.FINISHED]

    def add(
        self, ids: Tensor | Sequence[int], *, cache: DynamicCache | None = None, keep: bool = False,
        seed: int | None = None, logprobs: int | None = None, **asked: Any,
    ) -> Request:  # fmt: skip
        """Add a request.

        Args:
            ids: token ids of one prompt: a list of ints, or int64 [n] or [1, n].
            cache: a cache of one row with the first tokens of `ids`, all but the last at most. The batch takes it over.
            keep: when the request is finished, its `cache` is a cache of its row.
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
        read = 0 if cache is None else cache.get_seq_length()
        if not read < len(prompt):
            raise ValueError(f"the prompt has {len(prompt)} tokens, of which {read} are cached: give one more at least")
        request = request_for(self.model, prompt, {**asked, "seed": seed}, cache, read)
        request.keeps, request.top_logprobs, request.ahead = keep, logprobs, most_drafted(self.options)
        self.rope.prepare(request)
        if cache is not None:
            self.memory.learn(cache, self.joins)
        self.memory.check_alone(request)
        if self.rope.has_other_frequencies(request):
            prefill_all_of(request)
        self.requests.append(request)  # the next step queues it, so that an interrupt leaves it out or in
        return request

    def step(self) -> list[tuple[Request, int]]:
        """Run one step, and return the generated tokens as (request, token).

        A step admits waiting requests, prefills one chunk of one prompt, and decodes a token for each running request,
        or the accepted part of its draft. A request whose logits processor fails is finished, with its `error`.

        If the model fails or an interrupt (Ctrl-C) ends a step, `step` raises, and can be called again. The next step
        prefills all open requests again, decodes their known tokens again, and returns the tokens that the interrupted
        step could not. A cache that was passed to `add` is lost then: its tokens are prefilled, so with lossy options
        later tokens may differ. A request for which the model fails twice at the same token, alone, is finished with
        its `error`.
        """
        self.recover()
        self.unfinished = True
        self.run_step()
        told = [
            (request, token)
            for request in self.requests
            for token in request.generated[self.returned.get(request, 0) :]
        ]
        returned = {request: len(request.generated) for request in self.requests}
        self.returned, self.unfinished = returned, False  # nothing is called from here on: no signal comes between
        return told

    @torch.no_grad()
    def run_step(self) -> None:
        self.requests = [one for one in self.requests if one.stage is not Stage.FINISHED or self.unreturned(one)]
        queued = set(self.waiting)
        self.waiting += [one for one in self.requests if one.stage is Stage.WAITING and one not in queued]
        self.admit()
        self.preempt()
        for group in list(self.groups):
            self.prefill_again(group)
            if group.requests:
                self.decode_group(group)
        if self.prefilling:
            self.read(self.prefilling[0])

    def prefill_again(self, group: RowGroup) -> None:
        """RowGroup whose text has grown to where its RoPE changes wait, and are read again."""
        for request in [one for one in group.requests if self.rope.changes(one)]:
            self.drop(request)
            request.resumed = request.reached
            request.restart()
            request.whole = True
            self.waiting.insert(0, request)

    def unreturned(self, request: Request) -> int:
        return len(request.generated) - self.returned.get(request, 0)

    def recover(self) -> None:
        """After a step that did not return: begin again from the requests, the one record that it cannot have left half
        written."""
        if not self.unfinished:
            return
        caches = [self.places, *(group.cache for group in self.groups), *(request.cache for request in self.open)]
        self.memory.restart(cache for cache in caches if cache is not None)
        self.groups, self.prefilling, self.places = [], [], None
        for request in self.open:
            drop_swapped(request)
            request.restart()
            request.whole = self.rope.reads_whole(request)
        begun = sorted(self.open, key=lambda request: (not request.generated, request.began))
        self.waiting = begun

    def run(self) -> None:
        """Step until every request is finished."""
        while self.open:
            self.step()

    def remove(self, request: Request) -> None:
        """End a request in any stage; it has no row in the next step."""
        self.recover()
        self.unfinished = True
        self.leave(request)
        self.unfinished = False

    def leave(self, request: Request) -> None:
        if request.stage is not Stage.FINISHED:
            self.drop(request)
            self.over(request, End.REMOVED)

    def forget_prefixes(self) -> None:
        """Drop the cached prompt prefixes.

        A batch does so itself when it sees that the model's weights or settings have changed. It samples the weights
        when a request starts. Call this after writes through `.data` or numpy that change only a few values, and after
        any change during a prompt's prefill. Running requests continue with their caches.
        """
        self.memory.forget_prefixes()
        for request in self.prefilling:
            request.prefilled_here = False  # its first chunks stay out of the prefixes

    def fail(self, request: Request, error: Exception) -> None:
        """End a request, wherever it is, with its error."""
        self.drop(request)
        self.over(request, End.FAILED, error)

    def over(self, request: Request, end: End, error: Exception | None = None) -> None:
        """End a request that has no row."""
        drop_swapped(request)
        if request.cache is not None and self.memory.tiers_of(request.cache) is not None:
            drop(request.cache)
        request.finish(end, error)

    def take(self, request: Request) -> DynamicCache | None:
        """Remove a request, and return its cache of one row; None if none of its tokens were cached, or the cache
        cannot be read."""
        self.recover()
        self.unfinished = True
        group = self.group_of(request)
        if request.swapped is not None:
            request.cache = swapped_in_or_none(request, self.model)
        cache, request.cache = request.cache if group is None else kept_row(group, request), None
        self.leave(request)
        self.unfinished = False
        return cache

    def group_of(self, request: Request) -> RowGroup | None:
        return next((group for group in self.groups if request in group.requests), None)

    def drop(self, request: Request) -> None:
        """Forget a request, and its row."""
        for requests in (self.waiting, self.prefilling):
            if request in requests:
                requests.remove(request)
        group = self.group_of(request)
        if group is not None:
            self.keep(group, [other for other in group.requests if other is not request])

    def keep(self, group: RowGroup, requests: list[Request]) -> None:
        """Only these of a group go on. Where there are none, the places of rows in pages stay for those that come next,
        and what is recorded over them."""
        group.keep(requests)
        if requests:
            return
        self.groups.remove(group)
        if group.paged:
            if self.places is not None:
                drop(self.places)
            self.places = group.cache if empty_places(group.cache) else None

    def admit(self) -> None:
        """Let those begin that there is room for. The first of all begins alone: it tells what a layer keeps."""
        while self.has_free_row and (asking := self.startable):
            chosen = next_to_start(asking, functools.partial(self.memory.fits, running=self.running))
            if chosen is None:
                if self.running or not self.make_room():
                    return
                continue
            if self.memory.notice_weights(self.model):
                continue  # fewer pages may be shared
            if not self.begin(chosen):
                return

    def begin(self, request: Request) -> bool:
        """Have a request that waits read its prompt, or go on where it gave way. False where it waits on: there was no
        room to bring it back, and others run that will leave some."""
        request.began, self.begun = self.begun, self.begun + 1
        if not self.fits_alone(request):
            return True
        if request.swapped is not None:
            try:
                request.cache = twice(functools.partial(self.swap_in, request.swapped))
            except FailedTwice as failed:
                if self.running:
                    return False
                self.fail(request, failed.error)
                return True
        with self.attempt([request]):
            if request.read == len(request.text):
                self.start_decoding(request)
            else:
                self.memory.begin(request)
                self.prefilling.append(request)
                request.stage = Stage.PREFILL
        self.waiting.remove(request)
        drop_swapped(request)
        return True

    def swap_in(self, folder: Path) -> DynamicCache:
        return self.memory.paged_or_same(load_swapped(folder, self.model))

    def fits_alone(self, request: Request) -> bool:
        """Whether the budget would hold a request alone; one that it would not hold is over."""
        try:
            twice(functools.partial(self.memory.check_alone, request))
        except FailedTwice as failed:
            self.fail(request, failed.error)
            return False
        return True

    def start_decoding(self, request: Request) -> RowGroup:
        """A request that has read its prompt is a row now."""
        assert request.cache is not None
        group = self.joined(request, request.cache)
        request.cache, request.stage = None, Stage.DECODE
        group.requests.append(request)
        return group

    def preempt(self) -> None:
        """Where the next turn's pages are not there: those that wait give theirs back, and then who began last."""
        while self.aside is not None and self.memory.pool is not None and not self.memory.has(self.next_pages):
            idle = self.waiting_with_pages
            running = [request for request, cache, _ in self.running if self.may_be_in_pages(request, cache)]
            last = idle[-1] if idle else max(running, key=lambda request: request.began)
            if idle or len(running) > 1:
                self.swap_out(last, self.aside)
            else:
                self.fail(last, memory_is_kept())

    def next_pages(self) -> int:
        """Pages that the next turn takes."""
        steps = [(one, self.next_tokens(one[0])) for one in self.running]
        return sum(self.memory.still_needed(*one, one[0].cached + tokens) for one, tokens in steps)

    def next_tokens(self, request: Request) -> int:
        """Tokens that the next turn caches of a request that runs."""
        if request.stage is Stage.DECODE:
            return 1 + request.ahead
        left = self.rope.until_switch(request)
        return left if request.whole else min(self.chunk, left)

    def may_be_in_pages(self, request: Request, cache: DynamicCache | None) -> bool:
        return request.stage is Stage.PREFILL or self.memory.tiers_of(cache) is not None

    def swap_out(self, request: Request, aside: SwapFolder) -> None:
        """A request waits, and its cache with it: where it waited, or in front of all that have not begun."""
        group, waits = self.group_of(request), request in self.waiting
        try:
            if group is not None:
                request.cache = twice(functools.partial(group.row, request))
            twice(functools.partial(aside.put, request))
        except FailedTwice as failed:
            self.fail(request, failed.error)
            return
        if not waits:
            self.drop(request)
            self.waiting.insert(0, request)

    @property
    def has_free_row(self) -> bool:
        """Whether there may be one more row."""
        return len(self.prefilling) + len(self.decoding) < self.most_rows

    @property
    def startable(self) -> list[Request]:
        """Of those that wait: prompts are read one after another, since the one that is read has a place beside the
        rows'; who has read his comes back meanwhile."""
        return [request for request in self.waiting if request.swapped is not None] if self.prefilling else self.waiting

    def make_room(self) -> bool:
        """Where nothing runs that would give memory back: have the last request that waits with a cache read its prompt
        anew; False, and the first one is over, where there is none."""
        holding = [request for request in self.waiting_with_pages if request is not self.waiting[0]]
        if not holding:
            self.over(self.waiting.pop(0), End.FAILED, memory_is_kept())
            return False
        prefill_all_of(holding[-1])
        return True

    @property
    def waiting_with_pages(self) -> list[Request]:
        """Those that wait, and hold pages meanwhile."""
        return [request for request in self.waiting if self.memory.tiers_of(request.cache) is not None]

    @property
    def running(self) -> list[Running]:
        rows = [(request, group.cache, row) for group in self.groups for row, request in enumerate(group.requests)]
        return [*rows, *((request, request.cache, 0) for request in self.prefilling)]

    def read(self, request: Request) -> None:
        """Read a chunk of a prompt; behind its last one the request has said a token, and is a row of the batch."""
        with self.attempt([request]):
            text = request.text
            tokens = text[request.read : request.read + self.next_tokens(request)].to(self.model.device)[None]
            positions = torch.arange(request.read, request.read + tokens.shape[1], device=tokens.device)[None]
            if request.cache is not None:
                request.cache = self.memory.paged_or_same(request.cache)
            cache, logits = self.call_model(tokens, positions, request.cache)
            request.cache, request.read = cache, request.read + tokens.shape[1]
            if not self.memory.layers:
                self.memory.learn(cache, self.joins)
                if not self.fits_alone(request):
                    return
            request.cache = self.memory.paged_or_same(cache)
            self.memory.keep_prefix(request)
            if request.read < len(text):
                return
            group = self.start_decoding(request)
        self.prefilling.remove(request)
        say(request, [], logits[0, -1:])
        self.release_finished(group)

    def joined(self, request: Request, cache: DynamicCache) -> RowGroup:
        """The rows that a request's cache, of one row, is now the last of."""
        paged = self.memory.tiers_of(cache) is not None
        for group in self.groups if paged and not request.alone else ():
            if (
                group.paged
                and not any(one.alone for one in group.requests)
                and reason_against([group.cache, cache]) is None
            ):
                group.cache = append_rows(group.cache, cache)
                drop(cache)
                return group
        first = paged and (self.places is not None or not any(group.paged for group in self.groups))
        self.groups.append(RowGroup(self.placed(cache) if first else cache, [], paged))
        return self.groups[-1]

    def placed(self, cache: DynamicCache) -> DynamicCache:
        """A cache of one row in pages as the first of many: where those were that have left, if there were such."""
        places, self.places = self.places, None
        if places is None or reason_against([places, cache]) is not None:
            if places is not None:
                drop(places)
            return place_for(cache, self.most_rows)
        placed = append_rows(places, cache)
        drop(cache)
        return placed

    def decode_group(self, group: RowGroup) -> None:
        """One token of each row of a group, and before it what is right of the row's draft."""
        start, session = time.perf_counter(), self.drafting(group)
        compiled = 0 if session is None else rewritten_so_far(self.model)
        with self.attempt(group.requests):
            drafts = [[] for _ in group.requests] if session is None else self.drafts(group, session)
            several = any(drafts)
            with contextlib.nullcontext() if session is None else verifying(session, drafts):
                logits = self.call_rows(group, *fed(group.requests, drafts), every=several)
        before = [request.cached for request in group.requests]
        for row, request in enumerate(group.requests):
            say(request, drafts[row], logits[row] if several else logits[row, -1:])
        if session is not None:
            seconds = None if rewritten_so_far(self.model) != compiled else time.perf_counter() - start
            note_round(session, drafts, before, [request.cached for request in group.requests], seconds)
        try:
            group.crop()
        finally:
            self.release_finished(group)

    @contextlib.contextmanager
    def attempt(self, requests: Sequence[Request]) -> Iterator[None]:
        """If what is within raises, have each request begin again, alone. One for which it raises a second time after
        the same token is over with the error."""
        places = [(request, (request.stage, request.cached)) for request in requests]
        try:
            yield
        except Exception as error:
            for request, place in places:
                if place in request.failures:
                    self.over(request, End.FAILED, error)
                request.failures.add(place)
                request.alone = True
            raise
        for request, place in places:
            request.failures.discard(place)

    def drafting(self, group: RowGroup) -> Session | None:
        """The session of rows that draft; a person is told once why others do not."""
        session = drafting_session(group.cache)
        if session is None:
            return None
        group.crop()
        reason = reason_not_to_draft(self.model, group.cache, len(group.requests))
        if reason is None:
            return session
        warn_not_drafted(self.model, session.options, reason)
        return None

    def drafts(self, group: RowGroup, session: Session) -> list[list[int]]:
        """Those of each row; the cache is as before."""
        if session.options.lookup:
            return looked_up_for(group.requests)

        def one_token(tokens: Tensor, positions: Tensor) -> Tensor:
            return self.call_rows(group, tokens, positions)[:, -1]

        drafts = decoded_for(group.requests, session, one_token)
        group.crop()
        return drafts

    def call_rows(self, group: RowGroup, tokens: Tensor, positions: Tensor, every: bool = False) -> Tensor:
        device = self.model.device
        group.cache, logits = self.call_model(tokens.to(device), positions.to(device), group.cache, every)
        return logits

    def release_finished(self, group: RowGroup) -> None:
        """The rows of requests that are over leave a group."""
        for request in group.requests:
            if request.stage is Stage.FINISHED and request.keeps and request.end is not End.FAILED:
                request.cache = kept_row(group, request)
        self.keep(group, [request for request in group.requests if request.stage is not Stage.FINISHED])

    def call_model(
        self, tokens: Tensor, positions: Tensor, cache: DynamicCache | None, every: bool = False
    ) -> tuple[DynamicCache, Tensor]:
        """The cache behind new tokens [B, T], and the last ones' logits [B, 1, V]; of every token, [B, T, V], where
        asked, or where the model has no choice."""
        # 0 is all: their number would make a graph for each number of drafted tokens.
        more: dict[str, Any] = {"logits_to_keep": 0 if every else 1} if self.model._supports_logits_to_keep() else {}
        if self.joins:
            more["position_ids"] = positions
        out = self.model(input_ids=tokens, **with_cache(cache), use_cache=True, return_dict=True, **more)
        return cache_of(out), out.logits


def token_ids(ids: Tensor | Sequence[int]) -> Tensor:
    """Token ids of one prompt, int64 [n]. ValueError where they are none, or several prompts'."""
    given = torch.as_tensor(ids).cpu()
    if given.numel() and (given.is_floating_point() or given.dtype == torch.bool):
        raise ValueError(f"the prompt is {given.dtype}: give token ids, which are integers")
    if given.dim() > 1 and given.numel() != given.shape[-1]:
        raise ValueError(f"the prompt has shape {[*given.shape]}: add each row as a request of its own")
    return given.reshape(-1).to(torch.int64)


def prefill_all_of(request: Request) -> None:
    """Drop a cache that was given to a request, which waits: its tokens are prefilled again."""
    if request.cache is not None:
        drop(request.cache)
    request.cache, request.read, request.prefilled_here = None, 0, True


def kept_row(group: RowGroup, request: Request) -> DynamicCache | None:
    """A request's row as a cache alone; None where a copy of it has failed: what was said is whole, and is not kept."""
    try:
        return twice(functools.partial(group.row, request))
    except FailedTwice:
        return None


def no_budget() -> SpecacheError:
    return SpecacheError(
        "overcommit: there is no memory that could run out: say how much there is (device_memory or host_memory of the "
        "batch, --session-device-gib or --session-host-gib of the server)"
    )


def memory_is_kept() -> SpecacheError:
    return SpecacheError(
        "the memory that this request needs is that of caches which are kept (Batch.add with keep=True, Batch.take), "
        "and no request is left that would give some back: drop them, or raise device_memory or host_memory"
    )
