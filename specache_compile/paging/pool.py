"""The pool of pages, on the device and on the host together.

A page is 256 tokens of every layer: codes and parameters on the device, pairs on the host. Rows may share pages; a
row that would change a shared page first gets its own copy. A page is in use while live tiers list it, so an
interrupted call can leave no wrong count.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
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

    pages: number of pages. backed: those that have host memory too, and can be allocated.
    null_page: page 0 belongs to no row, and padding rows write to it.
    bound: the most pages, all allocated at the start, so that none ever moves. None: unbounded.
    first: the first page of a row.
    state: of each layer, the state tensors that are in pages (`kernels/state/page_table.py`).
    page_bytes: bytes of a page in each tier.
    moves: how often a tensor has moved.
    tiers: all live tiers of the pool. Their lists of pages are replaced, never changed (`Tiers.set_pages`).
    died: one entry per deleted `Tiers` whose pages copies may still use.
    counted: the pages of all tiers, and the number of rows of each page.
    lock: held by a step of any session of the pool, since pages may move in a step.
    """

    @torch.inference_mode(False)
    def __init__(
        self, options: MethodOptions, layers: Sequence[LayerShape], pages: int, backed: int | None = None, *,
        null_page: bool = False, bound: int | None = None,
    ) -> None:  # fmt: skip
        self.options, self.layers, self.bound, self.first = options, list(layers), bound, int(null_page)
        self.page_bytes = page_bytes(options, layers)
        self.tiers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.died: list[None] = []
        self.counted: tuple[list[list[list[int]]], Counter[int]] = [], Counter()
        self.lock = threading.RLock()
        self.pages, self.backed, self.moves = pages, pages if backed is None else backed, 0
        self.state: list[LayerState] = [
            {
                field.name: empty(field, options, layer, pages, PAGE, self.backed)
                for field in paged_fields(options, layer)
            }
            for layer in layers
        ]

    @property
    def counts(self) -> Counter[int]:
        """Number of rows of each page that has some."""
        with self.lock:
            tables = [tiers.pages for tiers in self.tiers if tiers.pool is self]
            if tables != self.counted[0]:
                self.counted = tables, Counter(page for rows in tables for pages in rows for page in pages)
            return self.counted[1]

    @property
    def free(self) -> list[int]:
        """The free pages."""
        counts = self.counts
        return [page for page in range(self.first, self.backed) if page not in counts]

    @property
    def held(self) -> int:
        """Pages that belong to rows."""
        return len(self.counts)

    @torch.inference_mode(False)
    def grow_to(self, pages: int, backed: int) -> None:
        """Grow to so many pages, layer by layer. The tensor objects stay the same, since sessions refer to them.

        If it fails, all tensors have `pages` pages as before, since graphs assume one number in all layers.
        """
        with self.lock:
            copy_stream.drain(self.layers[0].device)
        pages = max(pages, self.pages)
        try:
            for layer, state in zip(self.layers, self.state, strict=True):
                for field in paged_fields(self.options, layer):
                    self.grow(field, layer, state[field.name], pages, backed)
        except BaseException:
            for tensor in (tensor for state in self.state for tensor in state.values() if len(tensor) > self.pages):
                tensor.set_(tensor[: self.pages])  # type: ignore[call-overload]
            raise
        self.pages, self.backed = pages, backed

    def grow(self, field: Field, layer: LayerShape, tensor: Tensor, pages: int, backed: int) -> None:
        """Grow one tensor in place if possible, else move it."""
        shape = (pages, *tensor.shape[1:])
        larger = host_grown(tensor, shape, layer.device, backed) if field.on_host else None
        if larger is tensor or (larger is None and not field.on_host and len(tensor) >= pages):
            return
        if larger is None:
            larger = empty(field, self.options, layer, pages, PAGE, backed)
            larger[: self.backed].copy_(tensor[: self.backed])
        tensor.set_(larger)  # type: ignore[call-overload]
        self.moves += 1

    def allocate(self, number: int) -> list[int]:
        """The lowest free pages, so that a row alone has adjacent ones; they are in use once tiers list them.

        SpecacheError, before anything has changed, if there are too few.
        """
        with self.lock:
            if not self.can_allocate(number):
                most = self.room_on_host() - self.first if self.bound is None else self.bound
                raise SpecacheError(
                    f"{number} more pages of {PAGE} tokens are needed, and {len(self.free)} of {most} are free. The "
                    "cache is unchanged. Drop caches that are not needed, or raise host_memory, or device_memory of "
                    "the Batch"
                )
            if missing := self.missing(number):
                self.grow_to(*self.larger(missing))
            pages = self.free[:number]
            if number and (died := len(self.died)):
                copy_stream.drain(self.layers[0].device)
                del self.died[:died]
            return pages

    def larger(self, missing: int) -> tuple[int, int]:
        """Pages after a growth by so many at least, and those with host memory. Each growth copies all pages, so the
        pool grows by half if the host has room."""
        least = self.backed + missing
        tokens = max(least, self.backed * 3 // 2) * PAGE
        return bucket(tokens) // PAGE, max(least, min(room(tokens) // PAGE, self.room_on_host()))

    def can_allocate(self, number: int) -> bool:
        """Whether so many pages are free, or an unbounded pool may grow by the missing ones."""
        missing = self.missing(number)
        return not missing or (self.bound is None and self.backed + missing <= self.room_on_host())

    def missing(self, number: int) -> int:
        """How many of so many pages are not free."""
        return max(0, number - (self.backed - self.first - self.held))

    def room_on_host(self) -> int:
        """Most pages of an unbounded pool, from the option host_memory or the free host memory."""
        given = self.options.host_memory
        whole = given is None and self.layers[0].device.type == "cpu"
        page = sum(self.page_bytes.values()) if whole else self.page_bytes["host"]
        return self.first + allowance(page * self.backed, given) // page if page else sys.maxsize

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
