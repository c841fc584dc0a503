"""The pool of pages: allocated, shared, freed and counted, on the device and on the host together.

A page is 256 tokens of every layer: codes and parameters on the device, pairs on the host. A page that is not full
belongs to one row; a full page is never written again, and may be shared.
"""

from __future__ import annotations

import collections
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from specache_compile.errors import SpecacheError
from specache_compile.kernels.memory.host_memory import allowance, host_empty
from specache_compile.kernels.state.page_table import PAGE
from specache_compile.methods.field import Field, LayerShape, LayerState
from specache_compile.options import MethodOptions
from specache_compile.runtime.state import fields_of, tier_totals

# First number of pages of an unbounded pool; each time the pool is full, it grows by half.
FIRST = 32
# The null page, which belongs to no row.
NULL_PAGE = 0


class PagePool:
    """The pages of one model's rows, under one set of options.

    bound: number of pages, all allocated at the start, so that none ever moves. None: unbounded; then all pages are
        copied to a larger buffer now and then. It starts with so many `pages`.
    state: of each layer, the state tensors that are in pages (`kernels/state/page_table.py`).
    page_bytes, row_bytes: bytes in each tier of a page, and of a row's other buffers.
    counts: number of rows of each page.
    sessions: the sessions of its rows.
    tiers: all live tiers with pages.
    returned: pages of tiers that have died, and the queues that may still copy for them.
    """

    @torch.inference_mode(False)
    def __init__(
        self, options: MethodOptions, layers: Sequence[LayerShape], bound: int | None = None, pages: int = FIRST
    ) -> None:
        self.options, self.layers, self.bound = options, list(layers), bound
        self.page_bytes, self.row_bytes = page_bytes(options, layers), row_bytes(options, layers)
        self.sessions: weakref.WeakSet[Any] = weakref.WeakSet()
        self.tiers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.returned: deque[tuple[list[list[int]], list[Any]]] = deque()
        self.counts: list[int] = [1]
        self.free: list[int] = []
        self.state: list[LayerState] = [
            {field.name: empty(field, options, layer, 1) for field in paged_fields(options, layer)} for layer in layers
        ]
        self.grow_to(1 + (pages if bound is None else bound))

    @property
    def held(self) -> int:
        """Pages that belong to rows."""
        self.collect()
        return len(self.counts) - 1 - len(self.free)

    @torch.inference_mode(False)
    def grow_to(self, pages: int) -> None:
        """Grow to so many pages, layer by layer. The tensor objects stay the same, since sessions refer to them."""
        before = len(self.counts)
        for session in list(self.sessions):
            session.settle()
        for layer, state in zip(self.layers, self.state, strict=True):
            for field in paged_fields(self.options, layer):
                larger = empty(field, self.options, layer, pages)
                # An earlier call that ran out of memory has left some tensors larger.
                larger.narrow(field.row_dim, 0, before).copy_(state[field.name].narrow(field.row_dim, 0, before))
                state[field.name].set_(larger)  # type: ignore[call-overload]
        self.counts += [0] * (pages - before)
        self.free += reversed(range(before, pages))

    def allocate(self, number: int) -> list[int]:
        """Allocate so many pages. SpecacheError, before anything has changed, if there are too few."""
        if not self.can_allocate(number):
            raise no_pages(number, len(self.free), self.room_on_host() - 1 if self.bound is None else self.bound)
        if number > len(self.free):
            least = len(self.counts) + number - len(self.free)
            self.grow_to(min(max(len(self.counts) * 3 // 2, least), self.room_on_host()))
        taken = [self.free.pop() for _ in range(number)]
        self.share(taken)
        return taken

    def can_allocate(self, number: int) -> bool:
        """Whether so many pages are free, or an unbounded pool may grow by the missing ones."""
        self.collect()
        missing = number - len(self.free)
        return missing <= 0 or (self.bound is None and len(self.counts) + missing <= self.room_on_host())

    def room_on_host(self) -> int:
        """Most pages of an unbounded pool, from the option host_memory or the free host memory."""
        given = self.options.host_memory
        whole = given is None and self.layers[0].device.type == "cpu"
        page = sum(self.page_bytes.values()) if whole else self.page_bytes["host"]
        return 1 + allowance(page * len(self.counts), given) // page if page else sys.maxsize

    def share(self, pages: Iterable[int]) -> None:
        """Count one more row for each of these pages."""
        for page in pages:
            self.counts[page] += 1

    def free_pages(self, pages: Iterable[int]) -> None:
        """Count one row less for each of these pages, and free those without a row."""
        for page in pages:
            self.counts[page] -= 1
            if not self.counts[page]:
                self.free.append(page)

    def collect(self) -> None:
        """Free the pages of tiers that have died."""
        while self.returned:
            rows, queues = self.returned[0]
            for queue in queues:
                queue.settle()
            self.release(rows)
            self.returned.popleft()

    def recount(self) -> None:
        """Count the pages again from the live tiers: an interrupted call may have left wrong counts."""
        alive = list(self.tiers)  # tiers that die from here on are counted, and freed later
        while self.returned:
            for queue in self.returned[0][1]:
                queue.settle()
            self.returned.popleft()
        counts = collections.Counter(page for tiers in alive for pages in tiers.pages for page in pages)
        self.counts = [1, *(counts[page] for page in range(1, len(self.counts)))]
        self.free = [page for page in reversed(range(1, len(self.counts))) if not self.counts[page]]

    def release(self, rows: list[list[int]]) -> None:
        """Free the pages of all rows of a session."""
        for pages in rows:
            self.free_pages(pages)
        rows.clear()

    def copy(self, source: int, target: int) -> None:
        """Copy one page. No copy of it may be under way."""
        for layer, state in zip(self.layers, self.state, strict=True):
            for field in paged_fields(self.options, layer):
                tensor = state[field.name]
                tensor.select(field.row_dim, target).copy_(tensor.select(field.row_dim, source))


def paged_fields(options: MethodOptions, layer: LayerShape) -> list[Field]:
    return [field for field in fields_of(options, layer) if field.by_page]


def empty(field: Field, options: MethodOptions, layer: LayerShape, pages: int) -> Tensor:
    """So many pages of a field, uninitialised."""
    shape, dtype = field.shape(options, layer, pages, PAGE), field.dtype(options, layer)
    if field.on_host:
        return host_empty(shape, dtype, layer.device)
    return torch.empty(shape, dtype=dtype, device=layer.device)


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


def page_bytes(options: MethodOptions, layers: Sequence[LayerShape]) -> dict[str, int]:
    """Bytes of a page, by tier."""
    return tier_totals(
        (field, field.nbytes(options, layer, 1, PAGE)) for layer in layers for field in paged_fields(options, layer)
    )


def row_bytes(options: MethodOptions, layers: Sequence[LayerShape]) -> dict[str, int]:
    """Bytes of a row's buffers outside of its pages, by tier."""
    return tier_totals(
        (field, field.nbytes(options, layer, 1, PAGE))
        for layer in layers
        for field in fields_of(options, layer)
        if field.by_row and not field.by_page
    )


def no_pages(number: int, left: int, bound: int) -> SpecacheError:
    return SpecacheError(
        f"{number} more pages of {PAGE} tokens are needed, and {left} of {bound} are free. The cache is unchanged. "
        "Drop caches that are not needed, or raise host_memory, or device_memory of the Batch"
    )
