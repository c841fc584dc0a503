"""The memory of a batch's rows: a pool of pages, what of it is promised to whom, and the beginnings that are kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from specache_compile.caches.rows import drop, in_pages, reason_against
from specache_compile.errors import SpecacheError
from specache_compile.kernels.state.page_table import PAGE
from specache_compile.methods.field import LayerShape
from specache_compile.model_key import model_key
from specache_compile.options import MethodOptions
from specache_compile.paging.paged_tiers import PagedTiers
from specache_compile.paging.pool import Pool, page_bytes, pages_for, row_bytes
from specache_compile.runtime.session import Session, session_of, sessions_of
from specache_compile.runtime.state import device_total, predicted_bytes

from .prefixes import Prefixes, ends_a_page
from .request import Request, Stage

# A request that runs, its cache, and its row there.
Running = tuple[Request, DynamicCache | None, int]
# The most beginnings that are kept: each has a place beside its pages.
BEGINNINGS = 8


@dataclass(frozen=True)
class Bytes:
    """Of tiers. As a budget: what all rows may have together; None: as many as there are."""

    device: int | None = None
    host: int | None = None

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes((self.device or 0) + (other.device or 0), (self.host or 0) + (other.host or 0))

    def times(self, count: int) -> Bytes:
        return Bytes((self.device or 0) * count, (self.host or 0) * count)

    def holds(self, other: Bytes) -> bool:
        pairs = ((self.device, other.device), (self.host, other.host))
        return all(most is None or (size or 0) <= most for most, size in pairs)


class Memory:
    """What a batch's rows have, and may have.

    layers: known when a first prompt has begun to be read.
    pool: None before that, and where rows cannot be in pages: then each has tiers of its own.
    give_up: has whoever keeps caches of ended requests drop one; whether there was one.
    kept: caches that others hold, of requests that are over or wait.
    overcommits: a request is promised what it needs next, and not all until its end (`aside.py`).
    """

    def __init__(
        self, options: MethodOptions, budget: Bytes, rows: int, chunk: int, kept: int, give_up: Callable[[], bool],
        overcommits: bool,
    ) -> None:  # fmt: skip
        self.options, self.budget, self.rows, self.chunk, self.give_up = options, budget, rows, chunk, give_up
        self.kept = kept
        self.overcommits = overcommits
        self.layers: list[LayerShape] = []
        self.pool: Pool | None = None
        unbounded = budget == Bytes() and options.host_memory is None
        self.prefixes = Prefixes(rows if unbounded else beginnings(rows))
        self.key: object = None

    def learn(self, cache: DynamicCache, joins: bool) -> None:
        """From a first cache: what a layer keeps. joins: the model takes positions that differ by row."""
        session = session_of(cache)
        if session is None or self.layers:
            return
        layers = list(session.layers)
        if joins and len(sessions_of(cache)) == 1 and reason_against([cache], apart=True) is None:
            options = options_of(session)
            fixed = in_rows(options, layers, self.rows, self.chunk, [], self.kept)
            self.pool = Pool(options, layers, bound(options, layers, self.budget, fixed))
        self.layers = layers

    def begin_again(self, caches: Iterable[DynamicCache]) -> None:
        """Forget all prefixes, and the caches of rows. The pool counts its pages again: an interrupted step may have
        left wrong counts, and others may have kept caches."""
        for cache in [*caches, *(cache for _, cache in self.prefixes.kept)]:
            if self.tiers_of(cache) is not None:
                for session in sessions_of(cache):
                    session.deferred.drop()
                drop(cache)
        self.prefixes = Prefixes(self.prefixes.most)
        if self.pool is not None:
            self.pool.recount()

    def notice_weights(self, model: torch.nn.Module) -> bool:
        """Forget the prefixes that the model computed with other weights or settings. True if there were some."""
        if self.layers and self.pool is None:  # no prefix is ever kept
            return False
        key = model_key(model)
        if key == self.key:
            return False
        self.key = key
        return self.forget_prefixes()

    def forget_prefixes(self) -> bool:
        """Forget all prefixes. True if there were some."""
        had = bool(self.prefixes.kept)
        while self.prefixes.drop_oldest():
            pass
        return had

    def taken_in(self, cache: DynamicCache) -> DynamicCache:
        """A cache that is the batch's now: in pages where it can be."""
        session = session_of(cache)
        if self.pool is None or session is None or reason_against([cache]) is not None:
            return cache
        if options_of(session) != self.pool.options:  # the prompt decides of them (option memory)
            return cache
        paged = in_pages(cache, self.pool)
        if paged is not cache:
            drop(cache)
        return paged

    def tiers_of(self, cache: DynamicCache | None) -> PagedTiers | None:
        """Those of a cache in this memory's pages."""
        session = None if cache is None else session_of(cache)
        tiers = None if session is None else session.tiers
        return tiers if isinstance(tiers, PagedTiers) and tiers.pool is self.pool else None

    def fits(self, request: Request, running: Sequence[Running]) -> bool:
        """Whether there is room for what a request is promised, beside those that run; beginnings that are kept make
        room."""
        if not self.layers:
            return not running
        if self.pool is None:
            lengths = [other.longest for other, _, _ in running] + [request.longest]
            return self.budget.holds(alone(self.options, self.layers, lengths))

        def need() -> int:
            promised = sum(self.still_needed(*other, self.until(other[0])) for other in running)
            own = self.still_needed(request, request.cache, 0, self.until(request))
            return promised + own - self.beginning_of(request)[0] // PAGE + self.margin(running)

        return self.could_fit(request, running) and self.has(need)

    def has(self, need: Callable[[], int]) -> bool:
        """Whether so many pages can be taken; beginnings and conversations that are kept make room."""
        assert self.pool is not None
        while self.pool.left is not None and need() > self.pool.left:
            if not (self.prefixes.drop_oldest() or self.give_up()):
                return False
        return True

    def margin(self, running: Sequence[Running]) -> int:
        """Pages that stay free when one more begins, so that nobody has to give way soon."""
        return len(running) if self.overcommits else 0

    def beginning_of(self, request: Request) -> tuple[int, DynamicCache | None]:
        """What is kept of the beginning of a request that has read nothing yet."""
        if request.cache is not None or request.aside is not None or request.whole or request.crosses:
            return 0, None
        return self.prefixes.longest(request.text)

    def until(self, request: Request) -> int:
        """Tokens that a request is promised room for."""
        return request.due if self.overcommits else request.longest

    def could_fit(self, request: Request, running: Sequence[Running]) -> bool:
        """Whether there would be room if nobody kept a beginning or a conversation."""
        assert self.pool is not None
        if self.pool.bound is None:
            return True
        begun = request.cache if request.cache is not None else self.beginning_of(request)[1]
        named, lacking = set[int](), 0
        for one, cache, row in [*running, (request, begun, 0)]:
            tiers = self.tiers_of(cache)
            pages = [] if tiers is None else tiers.pages[row]
            named.update(pages)
            if tiers is not None or one.stage is not Stage.SAYING:
                lacking += max(0, pages_for(self.until(one)) - len(pages))
        return len(named) + lacking + self.margin(running) <= self.pool.bound

    def still_needed(self, request: Request, cache: DynamicCache | None, row: int, until: int) -> int:
        """Pages that a request may yet take until it has so many tokens: theirs, and copies of what others have too. A
        row that is not in pages takes none."""
        tiers = self.tiers_of(cache)
        if tiers is None:
            return 0 if request.stage is Stage.SAYING else pages_for(until)
        return tiers.still_needed(row, request.cached, until)

    def check_alone(self, request: Request) -> None:
        """SpecacheError where the budget would not hold a request alone."""
        if not self.layers:
            return
        asked = (
            f"device_memory={self.budget.device}, host_memory={self.budget.host or self.options.host_memory} (bytes)"
        )
        if self.pool is None:
            needed = alone(self.options, self.layers, [request.longest])
            if not self.budget.holds(needed):
                raise too_large(
                    request, f"{needed.device:,} bytes on the device and {needed.host:,} on the host", asked
                )
        elif self.pool.bound is not None and (pages := pages_for(request.longest)) > self.pool.bound:
            raise too_large(request, f"{pages} pages of {PAGE} tokens, and there are {self.pool.bound}", asked)

    def begin(self, request: Request) -> None:
        """Let a request have the beginning of its prompt that is there."""
        if self.pool is None or request.cache is not None:
            return
        read, kept = self.beginning_of(request)
        request.cache = None if kept is None else copy.deepcopy(kept)
        request.read = read

    def keep_beginning(self, request: Request) -> None:
        """Keep what has been read of a prompt, where it ends with a page."""
        cache = request.cache
        if cache is None or self.tiers_of(cache) is None or not request.from_its_first:
            return
        if request.whole or request.crosses:
            return
        if ends_a_page(request.read, self.chunk):
            self.prefixes.put(request.text[: request.read], cache)


def options_of(session: Session) -> MethodOptions:
    """Those that a session has, once it is long enough to gain by them."""
    return session.tiers.pending or session.options


def beginnings(rows: int) -> int:
    """The most that are kept beside so many rows."""
    return min(rows, BEGINNINGS)


def of_tiers(tiers: Mapping[str, int]) -> Bytes:
    return Bytes(device_total(tiers), tiers["host"])


def alone(options: MethodOptions, layers: Sequence[LayerShape], lengths: Iterable[int]) -> Bytes:
    """Bytes of rows that end with these tokens and have tiers of their own."""
    return sum((of_tiers(predicted_bytes(options, layers, 1, length)) for length in lengths), Bytes(0, 0))


def in_rows(
    options: MethodOptions, layers: Sequence[LayerShape], rows: int, chunk: int, lengths: Iterable[int], kept: int = 0
) -> Bytes:
    """The most bytes of a batch of so many rows, of which some end with these tokens: their pages, and page 0; what a
    row, the prompt that is read, a beginning, and a cache that others hold have beside them; and tiers of its own that
    a prompt's first chunk has."""
    pages = of_tiers(page_bytes(options, layers)).times(1 + sum(map(pages_for, lengths)))
    places = of_tiers(row_bytes(options, layers)).times(rows + 1 + beginnings(rows) + kept)
    return pages + places + alone(options, layers, [chunk])


def too_large(request: Request, needs: str, asked: str) -> SpecacheError:
    return SpecacheError(
        f"a request of {request.longest:,} tokens needs {needs}, with {asked}: ask for fewer tokens, or raise them"
    )


def bound(options: MethodOptions, layers: Sequence[LayerShape], budget: Bytes, fixed: Bytes) -> int | None:
    """Pages that a budget holds beside what is `fixed`, and the option host_memory; None: no bound. On a CPU all are in
    the host's memory, of which a budget of that alone is."""
    page = of_tiers(page_bytes(options, layers))
    if layers[0].device.type == "cpu" and budget.device is None:
        page, fixed = (Bytes(0, (size.device or 0) + (size.host or 0)) for size in (page, fixed))
    on_host = page_bytes(options, layers)["host"]
    pairs = (
        (budget.device, fixed.device, page.device), (budget.host, fixed.host, page.host),
        (options.host_memory, on_host, on_host),
    )  # fmt: skip
    limits = [max(0, most - (beside or 0)) // size for most, beside, size in pairs if most is not None and size]
    return min(limits) if limits else None
