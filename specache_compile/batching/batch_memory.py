"""The memory of a batch: a pool of pages, the pages promised to requests, and the cached prefixes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from specache_compile.caches.joining import drop, in_pages, reason_against
from specache_compile.errors import SpecacheError
from specache_compile.kernels.state.page_table import PAGE
from specache_compile.methods.field import LayerShape
from specache_compile.model_key import model_key
from specache_compile.options import MethodOptions
from specache_compile.paging.paged_tiers import PagedTiers
from specache_compile.paging.pool import PagePool, page_bytes, pages_for, row_bytes
from specache_compile.runtime.session import Session, session_of, sessions_of
from specache_compile.runtime.state import device_total, predicted_bytes

from .prefixes import Prefixes, ends_a_page
from .request import Request, Stage

# A running request, its cache, and its row there.
Running = tuple[Request, DynamicCache | None, int]
# Most cached prefixes; each has fixed buffers in addition to its pages.
MOST_PREFIXES = 8


@dataclass(frozen=True)
class Bytes:
    """Bytes of tiers on the device and on the host. In a budget, None is unbounded."""

    device: int | None = None
    host: int | None = None

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes((self.device or 0) + (other.device or 0), (self.host or 0) + (other.host or 0))

    def times(self, count: int) -> Bytes:
        return Bytes((self.device or 0) * count, (self.host or 0) * count)

    def holds(self, other: Bytes) -> bool:
        pairs = ((self.device, other.device), (self.host, other.host))
        return all(most is None or (size or 0) <= most for most, size in pairs)


class BatchMemory:
    """The memory that a batch uses and may use.

    layers: shapes of the model's layers; empty until the first prompt chunk has run.
    pool: None until then, and for models whose rows cannot be paged.
    give_up: drops one of the caches that the caller holds; returns whether there was one.
    kept: number of caches that the caller may hold.
    overcommits: a request is promised the pages of its next step, not of its whole length (`swapping.py`).
    """

    def __init__(
        self, options: MethodOptions, budget: Bytes, rows: int, chunk: int, kept: int, give_up: Callable[[], bool],
        overcommits: bool,
    ) -> None:  # fmt: skip
        self.options, self.budget, self.rows, self.chunk, self.give_up = options, budget, rows, chunk, give_up
        self.kept = kept
        self.overcommits = overcommits
        self.layers: list[LayerShape] = []
        self.pool: PagePool | None = None
        unbounded = budget == Bytes() and options.host_memory is None
        self.prefixes = Prefixes(rows if unbounded else most_prefixes(rows))
        self.key: object = None

    def set_layers(self, cache: DynamicCache, joins: bool) -> None:
        """Set the layers' shapes from a first cache. joins: the model accepts positions that differ by row."""
        session = session_of(cache)
        if session is None or self.layers:
            return
        layers = list(session.layers)
        if joins and len(sessions_of(cache)) == 1 and reason_against([cache], apart=True) is None:
            options = options_of(session)
            fixed = upper_bound(options, layers, self.rows, self.chunk, [], self.kept)
            self.pool = PagePool(options, layers, bound(options, layers, self.budget, fixed))
        self.layers = layers

    def restart(self, caches: Iterable[DynamicCache]) -> None:
        """Drop all prefixes and the caches of rows, and count the pool's pages again.

        An interrupted step may have left wrong counts, and the caller may hold caches.
        """
        for cache in [*caches, *(cache for _, cache in self.prefixes.kept)]:
            if self.tiers_of(cache) is not None:
                for session in sessions_of(cache):
                    session.deferred.drop()
                drop(cache)
        self.prefixes = Prefixes(self.prefixes.most)
        if self.pool is not None:
            self.pool.recount()

    def notice_weights(self, model: torch.nn.Module) -> bool:
        """Drop the prefixes if the model's weights or settings have changed. True if there were some."""
        if self.layers and self.pool is None:  # no prefix is cached
            return False
        key = model_key(model)
        if key == self.key:
            return False
        self.key = key
        return self.forget_prefixes()

    def forget_prefixes(self) -> bool:
        """Drop all prefixes. True if there were some."""
        had = bool(self.prefixes.kept)
        while self.prefixes.drop_oldest():
            pass
        return had

    def paged_or_same(self, cache: DynamicCache) -> DynamicCache:
        """The cache in pages of the pool, or the cache itself if it cannot be paged."""
        session = session_of(cache)
        if self.pool is None or session is None or reason_against([cache]) is not None:
            return cache
        if options_of(session) != self.pool.options:  # they depend on the prompt (option memory)
            return cache
        paged = in_pages(cache, self.pool)
        if paged is not cache:
            drop(cache)
        return paged

    def tiers_of(self, cache: DynamicCache | None) -> PagedTiers | None:
        """The tiers of a cache that is in pages of this pool; None for any other cache."""
        session = None if cache is None else session_of(cache)
        tiers = None if session is None else session.tiers
        return tiers if isinstance(tiers, PagedTiers) and tiers.pool is self.pool else None

    def fits(self, request: Request, running: Sequence[Running]) -> bool:
        """Whether a request fits beside the running ones; cached prefixes are dropped if needed."""
        if not self.layers:
            return not running
        if self.pool is None:
            lengths = [other.longest for other, _, _ in running] + [request.longest]
            return self.budget.holds(unpaged_bytes(self.options, self.layers, lengths))

        def need() -> int:
            promised = sum(self.pages_needed(*other, self.until(other[0])) for other in running)
            own = self.pages_needed(request, request.cache, 0, self.until(request))
            return promised + own - self.prefix_of(request)[0] // PAGE + self.margin(running)

        return self.could_fit(request, running) and self.has(need)

    def has(self, need: Callable[[], int]) -> bool:
        """Whether so many pages can be allocated; cached prefixes and caches of the caller are dropped if needed."""
        assert self.pool is not None
        while self.pool.left is not None and need() > self.pool.left:
            if not (self.prefixes.drop_oldest() or self.give_up()):
                return False
        return True

    def margin(self, running: Sequence[Running]) -> int:
        """Pages to leave free for the running requests, so that none is preempted soon."""
        return len(running) if self.overcommits else 0

    def prefix_of(self, request: Request) -> tuple[int, DynamicCache | None]:
        """The longest cached prefix of a request that has nothing cached."""
        if request.cache is not None or request.swapped is not None or request.whole or request.crosses:
            return 0, None
        return self.prefixes.longest(request.text)

    def until(self, request: Request) -> int:
        """Tokens whose pages a request is promised."""
        return request.due if self.overcommits else request.longest

    def could_fit(self, request: Request, running: Sequence[Running]) -> bool:
        """Whether a request would fit without cached prefixes and caches of the caller."""
        assert self.pool is not None
        if self.pool.bound is None:
            return True
        own = request.cache if request.cache is not None else self.prefix_of(request)[1]
        held, missing = set[int](), 0
        for one, cache, row in [*running, (request, own, 0)]:
            tiers = self.tiers_of(cache)
            pages = [] if tiers is None else tiers.pages[row]
            held.update(pages)
            if tiers is not None or one.stage is not Stage.DECODE:
                missing += max(0, pages_for(self.until(one)) - len(pages))
        return len(held) + missing + self.margin(running) <= self.pool.bound

    def pages_needed(self, request: Request, cache: DynamicCache | None, row: int, until: int) -> int:
        """Pages that a request may still allocate until it has `until` tokens, copies of shared pages included. A row
        that is not paged needs none."""
        tiers = self.tiers_of(cache)
        if tiers is None:
            return 0 if request.stage is Stage.DECODE else pages_for(until)
        return tiers.pages_needed(row, request.cached, until)

    def check_alone(self, request: Request) -> None:
        """SpecacheError if the budget could not hold a request alone."""
        if not self.layers:
            return
        limits = (
            f"device_memory={self.budget.device}, host_memory={self.budget.host or self.options.host_memory} (bytes)"
        )
        if self.pool is None:
            needed = unpaged_bytes(self.options, self.layers, [request.longest])
            if not self.budget.holds(needed):
                raise too_large(
                    request, f"{needed.device:,} bytes on the device and {needed.host:,} on the host", limits
                )
        elif self.pool.bound is not None and (pages := pages_for(request.longest)) > self.pool.bound:
            raise too_large(request, f"{pages} pages of {PAGE} tokens, and the pool has {self.pool.bound}", limits)

    def attach_prefix(self, request: Request) -> None:
        """Give a request the longest cached prefix of its prompt."""
        if self.pool is None or request.cache is not None:
            return
        read, kept = self.prefix_of(request)
        request.cache = None if kept is None else copy.deepcopy(kept)
        request.prefilled = read

    def keep_prefix(self, request: Request) -> None:
        """Cache the prefilled part of a prompt as a prefix, if it ends with a page."""
        cache = request.cache
        if cache is None or self.tiers_of(cache) is None or not request.prefilled_here:
            return
        if request.whole or request.crosses:
            return
        if ends_a_page(request.prefilled, self.chunk):
            self.prefixes.put(request.text[: request.prefilled], cache)


def options_of(session: Session) -> MethodOptions:
    """The options of a session once it is long enough to be compressed."""
    return session.tiers.pending or session.options


def most_prefixes(rows: int) -> int:
    """Most prefixes that are cached beside so many rows."""
    return min(rows, MOST_PREFIXES)


def bytes_of(tiers: Mapping[str, int]) -> Bytes:
    return Bytes(device_total(tiers), tiers["host"])


def unpaged_bytes(options: MethodOptions, layers: Sequence[LayerShape], lengths: Iterable[int]) -> Bytes:
    """Bytes of rows of these final lengths, each with its own contiguous tiers."""
    return sum((bytes_of(predicted_bytes(options, layers, 1, length)) for length in lengths), Bytes(0, 0))


def upper_bound(
    options: MethodOptions, layers: Sequence[LayerShape], rows: int, chunk: int, lengths: Iterable[int], kept: int = 0
) -> Bytes:
    """An upper bound on the batch's bytes.

    It counts the pages of all final lengths and the null page, and the tiers of a first prompt chunk. It also counts
    the fixed state of every row, of the prefill, of each prefix and of each cache that the caller holds.
    """
    pages = bytes_of(page_bytes(options, layers)).times(1 + sum(map(pages_for, lengths)))
    places = bytes_of(row_bytes(options, layers)).times(rows + 1 + most_prefixes(rows) + kept)
    return pages + places + unpaged_bytes(options, layers, [chunk])


def too_large(request: Request, needs: str, limits: str) -> SpecacheError:
    return SpecacheError(
        f"a request of {request.longest:,} tokens needs {needs}; the budget is {limits}. Lower max_new_tokens, or "
        "raise the budget"
    )


def bound(options: MethodOptions, layers: Sequence[LayerShape], budget: Bytes, fixed: Bytes) -> int | None:
    """Pages that fit into a budget after the bytes `fixed`, and into the option host_memory; None: unbounded. On a CPU
    a budget without device bytes covers all tiers."""
    page = bytes_of(page_bytes(options, layers))
    if layers[0].device.type == "cpu" and budget.device is None:
        page, fixed = (Bytes(0, (size.device or 0) + (size.host or 0)) for size in (page, fixed))
    on_host = page_bytes(options, layers)["host"]
    pairs = (
        (budget.device, fixed.device, page.device), (budget.host, fixed.host, page.host),
        (options.host_memory, on_host, on_host),
    )  # fmt: skip
    limits = [max(0, most - (used or 0)) // size for most, used, size in pairs if most is not None and size]
    return min(limits) if limits else None
