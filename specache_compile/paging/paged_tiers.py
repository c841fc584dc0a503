"""The tiers of rows whose tokens are in pages of a pool; all other state is in buffers with one slice per row."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from specache_compile.kernels.state.page_table import PAGE, Pages, pairs_by
from specache_compile.methods.field import Field, LayerShape, LayerState
from specache_compile.options import MethodOptions
from specache_compile.runtime.state import adopt, empty, fields_of
from specache_compile.runtime.tiers import Tiers

from .pool import NULL_PAGE, PagePool, paged_fields, pages_for

T = TypeVar("T")


class PagedTiers(Tiers):
    """Like `Tiers`, but tensors that grow with the tokens are in pages of a pool.

    pages: page numbers of each row. Copy-on-write: a row that writes to a partly filled shared page first gets its own
        copy.
    rounded: for each row, the tokens up to which its window may differ from other rows' copies, because they came back
        from a host tier that rounds.
    most_rows: rows that the buffers are allocated for. Row b has slice b; slices without a row select no pairs.
    all_rows: of each layer, the buffers for all rows.
    by_rows: views of the state of the first rows, by their number.
    """

    def __init__(self, like: Tiers, pool: PagePool, pages: Sequence[list[int]], places: int) -> None:
        """Rows with these pages, and empty buffers for `places` rows. like: has the options."""
        vars(self).update(vars(like))
        self.sinks_known, self.pool, self.pages, self.batch = None, pool, list(pages), len(pages)
        self.queues: list[Any] = []
        pool.tiers.add(self)
        weakref.finalize(self, pool.returned.append, (self.pages, self.queues))
        self.rounded = [0] * self.batch
        self.capacity = self.room = 0
        self.most_rows = places
        self.all_rows = [row_state(self.options, layer, places) for layer in self.layers]
        self.update_state()
        self.write_table()

    def belong_to(self, session: Any) -> None:
        """Its copies must end before a page moves or gets another owner. When the tiers die, which may happen anywhere,
        their pages are only noted in `pool.returned`."""
        self.pool.sessions.add(session)
        self.queues.append(session.queue)

    def release_state(self) -> None:
        self.pool.release(self.pages)
        self.state, self.all_rows = [], []
        self.by_rows.clear()

    def update_state(self) -> None:
        """Set `state` to the pool's pages and the buffers of the current rows."""
        self.by_rows: dict[int, list[LayerState]] = {}
        self.state = self.padded_to(self.batch)

    def padded_to(self, rows: int) -> list[LayerState]:
        if rows not in self.by_rows:
            self.by_rows[rows] = []
            for layer, own, pages in zip(self.layers, self.all_rows, self.pool.state, strict=True):
                by_row = {field.name for field in row_fields(self.options, layer)}
                places = {name: tensor[:rows] if name in by_row else tensor for name, tensor in own.items()}
                self.by_rows[rows].append({**places, **pages})
        return self.by_rows[rows]

    def write_table(self) -> None:
        """Write the page table. Its width is the longest row's number of pages, rounded up to a power of two: a step is
        recorded once for each width."""
        longest = max(map(len, self.pages), default=0)
        width = 1 << max(longest - 1, 0).bit_length()
        self.capacity = self.room = width * PAGE
        rows = [[*row, *[NULL_PAGE] * (width - len(row))] for row in self.pages]
        self.table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(rows), width)

    def runs(self, values: Sequence[T]) -> list[tuple[slice, T]]:
        return [(slice(row, row + 1), value) for row, value in enumerate(values)]

    def pairs(self, site: int, name: str, rows: slice = slice(None)) -> Pages:
        assert self.table is not None
        return pairs_by(self.state[site][name], self.table[rows])

    def reserve(self, lengths: Sequence[int], new: int, settle: Callable[[], object]) -> bool:
        """Allocate the pages that each row's new tokens need, and copies of shared pages that it will write to.

        SpecacheError, before anything has changed, if the pool has too few pages.
        """
        taken = [pages_for(length + new) - len(row) for length, row in zip(lengths, self.pages, strict=True)]
        shared = [
            (row, number)
            for row, (length, pages) in enumerate(zip(lengths, self.pages, strict=True))
            for number in range(self.first_written(row, length), len(pages))
            if self.pool.counts[pages[number]] > 1
        ]
        if not shared and max(taken) <= 0:
            return False
        addresses = self.page_addresses()
        if shared:
            settle()
        fresh = iter(self.pool.allocate(len(shared) + sum(max(0, number) for number in taken)))
        for row, number in shared:
            before, self.pages[row][number] = self.pages[row][number], next(fresh)
            self.pool.copy(before, self.pages[row][number])
            self.pool.free_pages([before])
        for row, number in enumerate(taken):
            self.pages[row].extend(next(fresh) for _ in range(number))
        self.write_table()
        return addresses != self.page_addresses()

    def first_written(self, row: int, length: int) -> int:
        """The first page in which a row writes something that other rows with its tokens do not have. The low-bit codes
        of a full page are the same for all of them, once the center is set."""
        low_bit = self.options.low_bit_length(length)
        return (low_bit if low_bit < max(self.rounded[row], 1) else length) // PAGE

    def pages_needed(self, row: int, length: int, longest: int) -> int:
        """Pages that a row of `length` tokens may still allocate until it has `longest`, copies of shared ones
        included."""
        pages = self.pages[row]
        writes = pages[self.first_written(row, length) :]
        return max(0, pages_for(longest) - len(pages)) + sum(self.pool.counts[page] > 1 for page in writes)

    def page_addresses(self) -> list[int]:
        """Addresses of the first layer's pages; all layers move together."""
        return [tensor.data_ptr() for tensor in self.pool.state[0].values()]

    def crop(self, lengths: Sequence[int], before: Sequence[int]) -> None:
        super().crop(lengths, before)
        for row, (length, cached) in enumerate(zip(lengths, before, strict=True)):
            low_bit, was = (self.options.low_bit_length(n) for n in (length, cached))
            if low_bit < was and self.options.bits_on_host < 16:
                self.rounded[row] = min(length, max(was, self.rounded[row]))
            gone = self.pages[row][pages_for(length) :]
            del self.pages[row][pages_for(length) :]
            self.pool.free_pages(gone)
        self.write_table()

    def undo_step(self, lengths: Sequence[int]) -> None:
        super().undo_step(lengths)
        if self.options.bits_on_host < 16:
            self.rounded = list(lengths)

    def select(self, rows: Tensor) -> None:
        """Keep these rows. Rows that keep their slice are not touched; a row that moves comes from after them, or all
        rows get new buffers."""
        kept = rows.tolist()
        before, self.rounded = [list(pages) for pages in self.pages], [self.rounded[row] for row in kept]
        for row in kept:
            self.pool.share(before[row])
        self.pool.release(self.pages)
        self.pages.extend(list(before[row]) for row in kept)
        moved = [(place, row) for place, row in enumerate(kept) if place != row]
        in_place = len(kept) <= self.most_rows and all(row >= len(kept) for _, row in moved)
        self.move(moved if in_place else list(enumerate(kept)), None if in_place else len(kept))
        if in_place:
            self.clear_rows(slice(len(kept), self.batch))
        self.batch = len(kept)
        self.update_state()
        self.write_table()

    def move(self, moves: Sequence[tuple[int, int]], places: int | None) -> None:
        """Copy rows to slices, given as (slice, row); into new buffers of so many rows, if given."""
        before = self.all_rows
        if places is not None:
            self.most_rows = places
            self.all_rows = [row_state(self.options, layer, places) for layer in self.layers]
        for layer, old, new in zip(self.layers, before, self.all_rows, strict=True):
            for field in fields_of(self.options, layer):
                if field.by_page or not (field.by_row or places is not None):
                    continue
                if not field.by_row:
                    new[field.name].copy_(old[field.name])
                for place, row in moves if field.by_row else ():
                    new[field.name][place].copy_(old[field.name][row])

    def clear_rows(self, places: slice) -> None:
        """Make slices without a row select no pairs: an inactive row has no page table to find them in."""
        for layer, own in zip(self.layers, self.all_rows, strict=True):
            for field in row_fields(self.options, layer):
                own[field.name][places].fill_(field.empty)

    def reserve_rows(self, rows: int) -> None:
        """Allocate buffers for so many rows, if there are fewer."""
        if rows > self.most_rows:
            self.move([(row, row) for row in range(self.batch)], rows)
            self.update_state()

    def append_rows(self, rows: Sequence[tuple[PagedTiers, int]]) -> None:
        """Append rows of tiers of this pool, sharing their pages."""
        need = self.batch + len(rows)
        self.reserve_rows(need)
        for place, (others, row) in enumerate(rows, self.batch):
            self.pool.share(others.pages[row])
            self.pages.append(list(others.pages[row]))
            self.rounded.append(others.rounded[row])
            for layer, own, their in zip(self.layers, self.all_rows, others.all_rows, strict=True):
                for field in row_fields(self.options, layer):
                    own[field.name][place].copy_(their[field.name][row])
        self.batch, self.sinks_known = need, None
        self.update_state()
        self.write_table()

    def copy(self) -> PagedTiers:
        """A copy of the rows, which shares their pages; measurements start at zero."""
        return paged_rows([(self, row) for row in range(self.batch)])

    def contiguous(self, lengths: Sequence[int]) -> Tiers:
        made = Tiers(self.options, self.layers, self.batch, max(lengths), self.ranks)
        made.options, made.pending = self.options, None
        made.reserve(lengths, 0, lambda: None)
        for layer, pages, piece in zip(self.layers, self.state, made.state, strict=True):
            for field in fields_of(self.options, layer):
                if not field.by_page:
                    piece[field.name].copy_(pages[field.name])
            for row, length in enumerate(lengths):
                for number, page in enumerate(self.pages[row][: pages_for(length)]):
                    for field in paged_fields(self.options, layer):
                        stored = page_of(field, pages[field.name], page)
                        part_of(field, piece[field.name], row, number, stored).copy_(stored)
        return made

    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes of each tier. A shared page counts once for each row."""
        parts = ((sum(map(len, self.pages)), self.pool.page_bytes), (self.most_rows, self.pool.row_bytes))
        names = dict.fromkeys(name for _, sizes in parts for name in sizes)
        return {name: sum(count * sizes.get(name, 0) for count, sizes in parts) for name in names}

    def places(self) -> list[tuple[int, torch.Size]]:
        """Addresses and shapes of all buffers, whatever the number of rows."""
        every = (tensor for layers in (self.pool.state, self.all_rows) for state in layers for tensor in state.values())
        return [(tensor.data_ptr(), tensor.shape) for tensor in every]

    @property
    def most_cursors(self) -> int:
        return self.most_rows


def paged_rows(rows: Sequence[tuple[PagedTiers, int]]) -> PagedTiers:
    """Tiers of these rows of one pool, which share their pages."""
    first = rows[0][0]
    made = PagedTiers(first, first.pool, [], len(rows))
    made.append_rows(rows)
    return made


def row_fields(options: MethodOptions, layer: LayerShape) -> list[Field]:
    """Fields with one slice per row, outside of the pages."""
    return [field for field in fields_of(options, layer) if field.by_row and not field.by_page]


def row_state(options: MethodOptions, layer: LayerShape, places: int) -> LayerState:
    """Empty buffers for so many rows, and the counts over all rows."""
    fields = [field for field in fields_of(options, layer) if not field.by_page]
    shapes = {field: field.shape(options, layer, places, PAGE) for field in fields}
    made = {f.name: empty(f, shape, f.dtype(options, layer), layer, 0) for f, shape in shapes.items()}
    adopt(made, layer)
    return made


def page_of(field: Field, pages: Tensor, page: int) -> Tensor:
    """One page of a field: [H, n, ...]."""
    return pages[0, page] if field.on_host else pages[page]


def part_of(field: Field, piece: Tensor, row: int, number: int, page: Tensor) -> Tensor:
    """The part of a row in contiguous tiers that page `number` of the row holds: 256 tokens."""
    if field.on_host:
        return piece[number, row]
    each = page.shape[1]
    return piece[row].narrow(1, number * each, each)


def paged(tiers: Tiers, lengths: Sequence[int], pool: PagePool) -> PagedTiers:
    """Tiers copied into pages of a pool; tiers that have pages of this pool are returned."""
    if isinstance(tiers, PagedTiers) and tiers.pool is pool:
        return tiers
    tiers = tiers.contiguous(lengths)
    taken = iter(pool.allocate(sum(map(pages_for, lengths))))
    made = PagedTiers(tiers, pool, [[next(taken) for _ in range(pages_for(n))] for n in lengths], tiers.batch)
    for layer, piece, pages in zip(made.layers, tiers.state, made.state, strict=True):
        for field in row_fields(made.options, layer):
            pages[field.name].copy_(piece[field.name])
        for row, own in enumerate(made.pages):
            for number, page in enumerate(own):
                for field in paged_fields(made.options, layer):
                    stored = page_of(field, pages[field.name], page)
                    stored.copy_(part_of(field, piece[field.name], row, number, stored))
    return made
