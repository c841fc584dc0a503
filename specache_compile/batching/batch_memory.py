"""The memory of a batch: a pool of pages, the pages promised to requests, and the cached prefixes."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from specache_compile.caches.joining import in_pages, reason_against
from specache_compile.errors import RequestError
from specache_compile.kernels.memory.host_memory import allowance
from specache_compile.kernels.state.page_table import PAGE
from specache_compile.methods.field import LayerShape
from specache_compile.model_key import Watch, model_key
from specache_compile.options import MethodOptions
from specache_compile.paging.pool import PagePool, batch_pool, pages_for
from specache_compile.runtime.break_even import free_memory
from specache_compile.runtime.session import session_of, sessions_of
from specache_compile.runtime.state import device_total, page_bytes, predicted_bytes, tier_bytes
from specache_compile.runtime.tiers import Tiers

from .prefixes import Prefix, Prefixes, SpillFolder, can_crop
from .request import Request, Stage

# A running request, its cache, and its row there.
Running = tuple[Request, DynamicCache | None, int]
# Most cached prefixes; each has fixed buffers in addition to its pages.
MOST_PREFIXES = 8


@dataclass(frozen=True)
class Bytes:
    """Bytes of tiers on the device and on the host. In a budget, inf is unbounded."""

    device: float = 0
    host: float = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.device + other.device, self.host + other.host)

    def holds(self, other: Bytes) -> bool:
        return other.device <= self.device and other.host <= self.host


def bytes_or_inf(given: int | None) -> float:
    return math.inf if given is None else given


class BatchMemory:
    """The memory that a batch uses and may use.

    budget: most bytes of the tiers.
    layers: shapes of the model's layers; empty until the first prompt chunk has run.
    pool: None until then, and for models whose rows cannot be paged. Their requests run one after another.
    sessions: the largest number of finished requests that are kept as prefixes.
    key: the key of the model's weights and settings. changes: how often it has changed.
    watch: of the model, while requests run.
    """

    def __init__(
        self, options: MethodOptions, budget: Bytes, rows: int, chunk: int, sessions: int, spill: SpillFolder | None
    ) -> None:
        self.options, self.budget, self.rows, self.chunk, self.sessions = options, budget, rows, chunk, sessions
        self.layers: list[LayerShape] = []
        self.pool: PagePool | None = None
        unbounded = budget == Bytes(math.inf, math.inf) and options.host_memory is None
        most = sessions or (rows if unbounded else min(rows, MOST_PREFIXES))
        self.prefixes = Prefixes(most, spill)
        self.key: object = None
        self.watch: Watch | None = None
        self.changes = 0

    def set_layers(self, cache: DynamicCache, joins: bool) -> None:
        """Set the layers' shapes from a first cache. joins: the model accepts positions that differ by row."""
        session = session_of(cache)
        if session is None or self.layers:
            return
        layers = list(session.layers)
        if joins and len(sessions_of(cache)) == 1 and reason_against([cache], apart=True) is None:
            options = session.final_options
            fixed = upper_bound(options, layers, self.rows, self.chunk, [], self.prefixes.most)
            self.pool = batch_pool(options, layers, bound(options, layers, self.budget, fixed))
        self.layers = layers

    def notice_weights(self, model: torch.nn.Module) -> bool:
        """Drop the prefixes if the model's weights or settings have changed. True if there were some."""
        if self.layers and self.pool is None and not self.sessions:  # no prefix is cached
            return False
        watch, key = Watch(model), model_key(model)
        had = key != self.key and self.forget_prefixes()
        self.key, self.watch = key, watch
        return had

    def notice_before_step(self, model: torch.nn.Module, keeps: bool) -> None:
        """Notice a change before each step. keeps: pairs of the step may be kept. A change that is undone before the
        next request starts would else leave a prefix of both weights."""
        if not keeps:
            self.watch = None
        elif self.watch is None or not self.watch.holds():
            self.notice_weights(model)

    def forget_prefixes(self) -> bool:
        """Drop all prefixes, and keep none of the requests that run. True if there were some."""
        self.changes += 1
        return self.prefixes.clear()

    def paged_or_same(self, cache: DynamicCache) -> DynamicCache:
        """The cache in pages of the pool, or the cache itself if it cannot be paged."""
        session = session_of(cache)
        if self.pool is None or session is None or reason_against([cache]) is not None:
            return cache
        return in_pages(cache, self.pool)

    def tiers_of(self, cache: DynamicCache | None) -> Tiers | None:
        """The tiers of a cache that is in pages of this pool; None for any other cache."""
        session = None if cache is None else session_of(cache)
        tiers = None if session is None else session.tiers
        return tiers if tiers is not None and self.pool is not None and tiers.pool is self.pool else None

    def fits(self, request: Request, running: Sequence[Running]) -> bool:
        """Whether a request fits beside the running ones, each up to its last token; cached prefixes are dropped if
        needed. Without running ones, a request with too little memory tries."""
        if self.pool is None:
            while not running and self.layers and not self.fits_beside_prefixes(request):
                self.prefixes.drop_oldest()
            return not running

        def need() -> int:
            # Running requests may still allocate pages up to their last tokens, copies of shared pages included.
            promised = sum(self.pages_needed(*each, each[0].longest) for each in running)
            return promised + pages_for(request.longest) - len(self.shared_pages(request))

        held = set(self.shared_pages(request))
        for _, cache, row in running:
            held.update(tiers.pages[row] if (tiers := self.tiers_of(cache)) else [])
        if self.pool.bound is not None and len(held) + need() > self.pool.bound:
            return False  # prefixes would be dropped in vain
        return self.make_room(need) or not running

    def pages_needed(self, request: Request, cache: DynamicCache | None, row: int, until: int) -> int:
        """Pages that a request may still allocate until it has so many tokens; none outside of the pool."""
        if cache is None:
            return pages_for(until)
        tiers = self.tiers_of(cache)
        return 0 if tiers is None else tiers.pages_needed(row, request.cached, until)

    def make_room_for_step(self, running: Sequence[Running]) -> None:
        """Drop the cached prefixes whose pages the next step needs: requests had them reserved when they began."""

        def until(request: Request) -> int:
            new = 1 if request.stage is Stage.DECODE else request.longest if request.whole else self.chunk
            return min(request.longest, request.cached + new)

        self.make_room(lambda: sum(self.pages_needed(*each, until(each[0])) for each in running))

    def make_room(self, need: Callable[[], int]) -> bool:
        """Whether so many pages can be allocated; cached prefixes are dropped if needed."""
        while self.pool is not None and not self.pool.can_allocate(need()):
            if not self.prefixes.drop_oldest():
                return False
        return True

    def fits_beside_prefixes(self, request: Request) -> bool:
        """Whether there is memory for a request that is not in pages, beside the prefixes that it does not continue."""
        needed = self.unpaged([request.longest])
        tokens, own = self.prefix_of(request)
        kept = [len(one.ids) for one in self.prefixes.in_memory if one is not own or tokens < len(one.ids)]
        on_host = needed.host + needed.device * (self.layers[0].device.type == "cpu")
        is_free = self.options.host_memory is not None or on_host <= allowance(0, None)
        return not kept or (is_free and self.budget.holds(needed + self.unpaged(kept)))

    def prefix_of(self, request: Request) -> tuple[int, Prefix | None]:
        """The longest cached prefix of a request that has nothing cached."""
        return (0, None) if request.whole else self.prefixes.longest(request.prompt)

    def shared_pages(self, request: Request) -> list[int]:
        """The pages of its prefix that a request shares, and will not write to."""
        tokens, prefix = self.prefix_of(request)
        tiers = None if prefix is None else self.tiers_of(prefix.cache)
        if prefix is None or tiers is None:
            return []
        return tiers.pages[0][: tiers.first_written(0, tokens, masked=False, cropped_from=len(prefix.ids))]

    def unpaged(self, lengths: Iterable[int]) -> Bytes:
        """Bytes of rows of these lengths that are not in pages of the pool."""
        return sum((bytes_of(predicted_bytes(self.options, self.layers, 1, n)) for n in lengths), Bytes())

    def error_alone(self, request: Request) -> RequestError | None:
        """The error of a request that the budget could not hold alone; None if it could."""
        if not self.layers:
            return None
        if self.pool is None:
            needed = self.unpaged([request.longest])
            fits = self.budget.holds(needed)
            needs = f"{needed.device:,} bytes on the device and {needed.host:,} on the host"
        else:
            pages, bound = pages_for(request.longest), self.pool.bound
            fits, needs = bound is None or pages <= bound, f"{pages} pages of {PAGE} tokens, and the pool has {bound}"
        if fits:
            return None
        host = min(self.budget.host, bytes_or_inf(self.options.host_memory))
        limits = {"device_memory": self.budget.device, "host_memory": host}
        budget = ", ".join(f"{name}={most:,} bytes" for name, most in limits.items() if most < math.inf)
        return RequestError(
            f"a request of {request.longest:,} tokens needs {needs}; the budget is {budget}. Lower max_new_tokens, or "
            "raise the budget"
        )

    def attach_prefix(self, request: Request, model: Any) -> None:
        """Give a request that has nothing cached a copy of the longest cached prefix of its prompt. A prefix that is
        not in pages, or on disk, leaves the store if the request continues all of it."""
        request.changes = self.changes
        request.reused, prefix = self.prefix_of(request)
        if prefix is None:
            return
        whole = request.reused == len(prefix.ids)
        cache = prefix.loaded(model)
        if (whole and self.tiers_of(cache) is None) or cache is None:
            prefix.cache = None
            self.prefixes.remove(prefix)
        elif cache is prefix.cache:
            cache = copy.deepcopy(cache)
        if cache is None:
            request.reused = 0
            return
        if not whole:
            cache.crop(request.reused - len(prefix.ids))
        request.cache, request.prefilled = self.paged_or_same(cache), request.reused

    def keep_prefill(self, request: Request) -> None:
        """Cache the prefilled part of a prompt as a prefix: with sessions the whole prompt, else a part that ends with
        a page."""
        cache, read = request.cache, request.prefilled
        if cache is None or self.tiers_of(cache) is None:
            return
        aligned = read % math.lcm(self.chunk, PAGE) == 0
        if (read == len(request.prompt) and can_crop(cache)) if self.sessions else aligned:
            self.keep(request, functools.partial(copy.deepcopy, cache), crops=bool(self.sessions))

    def keep(self, request: Request, copied: Callable[[], DynamicCache], crops: bool) -> None:
        """Cache a request's tokens as a prefix, unless their pairs depend on other tokens of a call, or on weights of
        before."""
        if request.cached and request.changes == self.changes and not request.whole:
            self.prefixes.put(request.ids[0, : request.cached], copied, crops)
            while self.sessions and self.layers and not self.has_free_memory():
                self.prefixes.drop_oldest()

    def has_free_memory(self) -> bool:
        """Whether the sessions have at most half of the memory, if each has its own. Pages of a bounded pool do not
        count."""
        bounded = self.pool is not None and self.pool.bound is not None
        own = (len(prefix.ids) for prefix in self.prefixes.in_memory if not (bounded and self.tiers_of(prefix.cache)))
        device, used = self.layers[0].device, self.unpaged(own)
        if device.type == "cuda":
            return Bytes(free_memory(device), free_memory(torch.device("cpu"))).holds(used)
        return used.device + used.host <= free_memory(device)


def bytes_of(tiers: Mapping[str, int]) -> Bytes:
    return Bytes(device_total(tiers), tiers["host"])


def upper_bound(
    options: MethodOptions, layers: Sequence[LayerShape], rows: int, chunk: int, lengths: Iterable[int], prefixes: int
) -> Bytes:
    """An upper bound on the batch's bytes.

    It counts the pages of all final lengths and the null page, and the tiers of a first prompt chunk. It also counts
    the fixed state of every row, of the prefill and of each prefix.
    """
    pages = 1 + sum(map(pages_for, lengths))
    held = tier_bytes(options, layers, pages, pages, rows + 1 + prefixes, PAGE)
    return bytes_of(held) + bytes_of(predicted_bytes(options, layers, 1, chunk))


def bound(options: MethodOptions, layers: Sequence[LayerShape], budget: Bytes, fixed: Bytes) -> int | None:
    """Pages that fit into a budget after the bytes `fixed`, and into the option host_memory; None: unbounded. On a CPU
    a budget without device bytes covers all tiers."""
    page = bytes_of(page_bytes(options, layers))
    on_host = page.host
    if layers[0].device.type == "cpu" and budget.device == math.inf:
        page, fixed = (Bytes(0, size.device + size.host) for size in (page, fixed))
    parts = (
        (budget.device, fixed.device, page.device), (budget.host, fixed.host, page.host),
        (bytes_or_inf(options.host_memory), on_host, on_host),
    )  # fmt: skip
    limits = [max(0, int((most - used) // size)) for most, used, size in parts if most < math.inf and size]
    return min(limits) if limits else None
