"""The pool of pages: allocated, shared, freed and counted, on the device and on the host together.

A page is 256 tokens of every layer: codes and parameters on the device, pairs on the host. A page that is not full
belongs to one row; a full page is never written again, and may be shared.
"""

from __future__ import annotations

import collections
import heapq
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from specache_compile.errors import SpecacheError
from specache_compile.kernels.memory.host_memory import allowance, host_grown
from specache_compile.kernels.movement import copy_stream
from specache_compile.kernels.state.page_table import PAGE
from specache_compile.methods.field import Field, LayerShape, LayerState
from specache_compile.options import MethodOptions
from specache_compile.runtime.state import bucket, empty, page_bytes, paged_fields, room

# First number of pages of an unbounded pool of a batch; each time the pool is full, it grows by half.
FIRST = 32


class PagePool:
    """The pages of one model's rows, under one set of options.

    pages: number of pages. places: those that have host memory too, and can be allocated.
    null_page: page 0 belongs to no row, and padding rows write to it.
    bound: the most pages, all allocated at the start, so that none ever moves. None: unbounded.
    first: the first page of a row. The lowest free page is allocated first, so that a row alone has adjacent pages.
    state: of each layer, the state tensors that are in pages (`kernels/state/page_table.py`).
    page_bytes: bytes of a page in each tier.
    counts: number of rows of each page.
    free: the free pages, a heap.
    moves: how often a tensor has moved.
    tiers: all live tiers with pages. tables: the pages of their rows, and of tiers that have died until `collect`.
    returned: pages of tiers that have died, to which copies may still be under way.
    lock: held by a step of any session of the pool, since pages may move in a step.
    """

    @torch.inference_mode(False)
    def __init__(
        self, options: MethodOptions, layers: Sequence[LayerShape], pages: int, places: int | None = None, *,
        null_page: bool = False, bound: int | None = None,
    ) -> None:  # fmt: skip
        places = pages if places is None else places
        self.options, self.layers, self.bound, self.first = options, list(layers), bound, int(null_page)
        self.page_bytes = page_bytes(options, layers)
        self.tiers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.tables: dict[int, list[list[int]]] = {}
        self.returned: deque[list[list[int]]] = deque()
        self.lock = threading.RLock()
        self.pages, self.moves = pages, 0
        self.counts = [0] * places
        self.free = list(range(self.first, places))
        self.state: list[LayerState] = [
            {field.name: empty(field, options, layer, pages, PAGE, places) for field in paged_fields(options, layer)}
            for layer in layers
        ]

    @property
    def held(self) -> int:
        """Pages that belong to rows."""
        self.collect()
        return len(self.counts) - self.first - len(self.free)

    @torch.inference_mode(False)
    def grow_to(self, pages: int, places: int) -> None:
        """Grow to so many pages, layer by layer. The tensor objects stay the same, since sessions refer to them.

        If it fails, all tensors have `pages` pages as before, since graphs assume one number in all layers.
        """
        with self.lock:
            copy_stream.drain(self.layers[0].device)
        pages, before = max(pages, self.pages), len(self.counts)
        try:
            for layer, state in zip(self.layers, self.state, strict=True):
                for field in paged_fields(self.options, layer):
                    self.grow(field, layer, state[field.name], pages, places)
        except BaseException:
            for tensor in (tensor for state in self.state for tensor in state.values() if len(tensor) > self.pages):
                tensor.set_(tensor[: self.pages])  # type: ignore[call-overload]
            raise
        self.pages = pages
        self.counts += [0] * (places - before)
        self.free += range(before, places)  # these are the largest, so the list stays a heap

    def grow(self, field: Field, layer: LayerShape, tensor: Tensor, pages: int, places: int) -> None:
        """Grow one tensor in place if possible, else move it."""
        shape = (pages, *tensor.shape[1:])
        larger = host_grown(tensor, shape, layer.device, places) if field.on_host else None
        if larger is tensor or (larger is None and not field.on_host and len(tensor) >= pages):
            return
        if larger is None:
            larger = empty(field, self.options, layer, pages, PAGE, places)
            larger[: len(self.counts)].copy_(tensor[: len(self.counts)])
        tensor.set_(larger)  # type: ignore[call-overload]
        self.moves += 1

    def allocate(self, number: int) -> list[int]:
        """Allocate so many pages. SpecacheError, before anything has changed, if there are too few."""
        with self.lock:
            self.check_room(number)
            if missing := self.missing(number):
                self.grow_to(*self.larger(missing))
            taken = [heapq.heappop(self.free) for _ in range(number)]
            self.share(taken)
            return taken

    def larger(self, missing: int) -> tuple[int, int]:
        """Pages after a growth by so many at least, and those with host memory. Each growth copies all pages, so the
        pool grows by half if the host has room."""
        least = len(self.counts) + missing
        tokens = max(least, len(self.counts) * 3 // 2) * PAGE
        return bucket(tokens) // PAGE, max(least, min(room(tokens) // PAGE, self.room_on_host()))

    def check_room(self, number: int) -> None:
        """SpecacheError if so many pages cannot be allocated."""
        if not self.can_allocate(number):
            most = self.room_on_host() - self.first if self.bound is None else self.bound
            raise SpecacheError(
                f"{number} more pages of {PAGE} tokens are needed, and {len(self.free)} of {most} are free. The cache "
                "is unchanged. Drop caches that are not needed, or raise host_memory, or device_memory of the Batch"
            )

    def can_allocate(self, number: int) -> bool:
        """Whether so many pages are free, or an unbounded pool may grow by the missing ones."""
        missing = self.missing(number)
        return not missing or (self.bound is None and len(self.counts) + missing <= self.room_on_host())

    def missing(self, number: int) -> int:
        """How many of so many pages are not free. An interrupted call may have left pages without a row; these are
        freed first."""
        self.collect()
        if number > len(self.free):
            self.recount()
        return max(0, number - len(self.free))

    def room_on_host(self) -> int:
        """Most pages of an unbounded pool, from the option host_memory or the free host memory."""
        given = self.options.host_memory
        whole = given is None and self.layers[0].device.type == "cpu"
        page = sum(self.page_bytes.values()) if whole else self.page_bytes["host"]
        return self.first + allowance(page * len(self.counts), given) // page if page else sys.maxsize

    def share(self, pages: Iterable[int]) -> None:
        """Count one more row for each of these pages."""
        with self.lock:
            for page in pages:
                self.counts[page] += 1

    def free_pages(self, pages: Iterable[int]) -> None:
        """Count one row less for each of these pages, and free those without a row."""
        with self.lock:
            for page in pages:
                self.counts[page] -= 1
                if not self.counts[page]:
                    heapq.heappush(self.free, page)

    def collect(self) -> None:
        """Free the pages of tiers that have died."""
        with self.lock:
            while self.returned:
                copy_stream.drain(self.layers[0].device)
                rows = self.returned[0]
                self.release(rows)
                self.tables.pop(id(rows), None)
                self.returned.popleft()

    def recount(self) -> None:
        """Count the pages again from the tables: an interrupted call may have left wrong counts."""
        with self.lock:
            self.collect()
            counts = collections.Counter(page for rows in self.tables.values() for pages in rows for page in pages)
            self.counts = [counts[page] for page in range(len(self.counts))]
            self.free = [page for page in range(self.first, len(self.counts)) if not self.counts[page]]

    def release(self, rows: list[list[int]]) -> None:
        """Free the pages of all rows of a session."""
        with self.lock:
            while rows:
                while rows[-1]:  # an interrupted call loses a page until `recount`, and frees none twice
                    self.free_pages([rows[-1].pop()])
                rows.pop()

    def copy(self, source: int, target: int, other: PagePool | None = None) -> None:
        """Copy one page, from another pool with the same fields if given. No copy of it may be under way."""
        for state, theirs in zip(self.state, (other or self).state, strict=True):
            for name, tensor in state.items():
                tensor[target].copy_(theirs[name][source])


def batch_pool(options: MethodOptions, layers: Sequence[LayerShape], bound: int | None = None) -> PagePool:
    """The pool of a batch, with a null page: so many pages for rows, or unbounded."""
    return PagePool(options, layers, 1 + (FIRST if bound is None else bound), null_page=True, bound=bound)


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)
