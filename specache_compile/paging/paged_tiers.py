"""The tiers of rows that have pages of a pool, and places for the rest: rows come, share and leave by their numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from specache_compile.kernels.state.page_table import PAGE, Pages, pairs_by
from specache_compile.methods.field import Field, LayerShape, LayerState
from specache_compile.options import MethodOptions
from specache_compile.runtime.state import adopt, empty, fields_of, rows_of
from specache_compile.runtime.tiers import Tiers

from .pool import NOBODYS, Pool, paged_fields, pages_for

T = TypeVar("T")


class PagedTiers(Tiers):
    """As `Tiers`: what grows with the tokens is in pages of a pool, and what a row has once in its place of a tensor.

    pages: of each row, those that its tokens are in. Of a page that several rows have, who is about to write there what
        is his alone gets a copy first: that is where its tokens are not all there.
    rounded: of each row, the tokens up to which those in its window may differ from what other rows have of them: they
        came back from a host tier that rounds.
    most_rows: that there are places for; row b has the b-th, and those that no row has want no fetch.
    all_places: of each layer, the tensors with all of them.
    by_rows: the state of so many rows, the first ones.
    """

    def __init__(self, like: Tiers, pool: Pool, pages: Sequence[list[int]], places: int) -> None:
        """Rows that have been given these pages, with nothing in their places. like: has the options."""
        vars(self).update(vars(like))
        self.sinks_known, self.pool, self.pages, self.batch = None, pool, list(pages), len(pages)
        self.queues: list[Any] = []
        pool.tiers.add(self)
        weakref.finalize(self, pool.returned.append, (self.pages, self.queues))
        self.rounded = [0] * self.batch
        self.capacity = self.room = 0
        self.most_rows = places
        self.all_places = [new_places(self.options, layer, places) for layer in self.layers]
        self.show()
        self.point()

    def belong_to(self, session: Any) -> None:
        """Its copies are waited for before a page moves, or is somebody else's. When the tiers die, which may be
        anywhere, it is only noted that their pages are free."""
        self.pool.sessions.add(session)
        self.queues.append(session.queue)

    def let_go(self) -> None:
        self.pool.release(self.pages)
        self.state, self.all_places = [], []
        self.by_rows.clear()

    def show(self) -> None:
        """Let `state` be the pool's pages, and the places of the rows that there are."""
        self.by_rows: dict[int, list[LayerState]] = {}
        self.state = self.filled_up(self.batch)

    def filled_up(self, rows: int) -> list[LayerState]:
        if rows not in self.by_rows:
            self.by_rows[rows] = []
            for layer, own, pages in zip(self.layers, self.all_places, self.pool.state, strict=True):
                by_row = {field.name for field in row_fields(self.options, layer)}
                places = {name: tensor[:rows] if name in by_row else tensor for name, tensor in own.items()}
                self.by_rows[rows].append({**places, **pages})
        return self.by_rows[rows]

    def point(self) -> None:
        """Write the table, as wide as the longest row has pages, up to a power of two: whatever comes and goes, few
        widths are met, and a step is recorded once for each."""
        longest = max(map(len, self.pages), default=0)
        width = 1 << max(longest - 1, 0).bit_length()
        self.capacity = self.room = width * PAGE
        self.allocated = (self.capacity, self.room)
        rows = [[*row, *[NOBODYS] * (width - len(row))] for row in self.pages]
        self.table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(rows), width)

    def runs(self, values: Sequence[T]) -> list[tuple[slice, T]]:
        return [(slice(row, row + 1), value) for row, value in enumerate(values)]

    def views(self, site: int, rows: slice) -> LayerState:
        fields = fields_of(self.options, self.layers[site])
        own = rows_of(self.state[site], [field for field in fields if not field.by_page], rows)
        pairs: dict[str, Any] = {f.name: self.pairs(site, f.name, rows) for f in fields if f.has_all_pairs}
        return {**own, **pairs}

    def pairs(self, site: int, name: str, rows: slice = slice(None)) -> Pages:
        assert self.table is not None
        return pairs_by(self.state[site][name], self.table[rows])

    def reserve(self, lengths: Sequence[int], new: int, settle: Callable[[], object]) -> bool:
        """Give each row the pages that its new tokens need, and copies of those that it would write and others have.

        SpecacheError, before anything has changed, where the pool has no page left.
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
        lay = self.where_pages_lie()
        if shared:
            settle()
        fresh = iter(self.pool.take(len(shared) + sum(max(0, number) for number in taken)))
        for row, number in shared:
            before, self.pages[row][number] = self.pages[row][number], next(fresh)
            self.pool.copy(before, self.pages[row][number])
            self.pool.give_back([before])
        for row, number in enumerate(taken):
            self.pages[row].extend(next(fresh) for _ in range(number))
        self.point()
        return lay != self.where_pages_lie()

    def first_written(self, row: int, length: int) -> int:
        """The first page in which a row writes what others with its tokens do not. What of a full page's tokens comes
        into the low-bit tier later is the same for all of them, once a center is."""
        low_bit = self.options.low_bit_length(length)
        return (low_bit if low_bit < max(self.rounded[row], 1) else length) // PAGE

    def still_needed(self, row: int, length: int, longest: int) -> int:
        """Pages that a row of `length` tokens may yet take until it has `longest`, copies of shared ones among them."""
        pages = self.pages[row]
        writes = pages[self.first_written(row, length) :]
        return max(0, pages_for(longest) - len(pages)) + sum(self.pool.counts[page] > 1 for page in writes)

    def where_pages_lie(self) -> list[int]:
        """Where the first layer's pages lie, which all move together."""
        return [tensor.data_ptr() for tensor in self.pool.state[0].values()]

    def crop(self, lengths: Sequence[int], before: Sequence[int]) -> None:
        super().crop(lengths, before)
        for row, (length, cached) in enumerate(zip(lengths, before, strict=True)):
            low_bit, was = (self.options.low_bit_length(n) for n in (length, cached))
            if low_bit < was and self.options.bits_on_host < 16:
                self.rounded[row] = min(length, max(was, self.rounded[row]))
            gone = self.pages[row][pages_for(length) :]
            del self.pages[row][pages_for(length) :]
            self.pool.give_back(gone)
        self.point()

    def take_back(self, lengths: Sequence[int]) -> None:
        super().take_back(lengths)
        if self.options.bits_on_host < 16:
            self.rounded = list(lengths)

    def select(self, rows: Tensor) -> None:
        """Keep these rows. Those that stay in their places are not touched, and one that moves is behind all of them,
        or the places are other ones."""
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
            self.clear_places(slice(len(kept), self.batch))
        self.batch = len(kept)
        self.show()
        self.point()

    def move(self, moves: Sequence[tuple[int, int]], places: int | None) -> None:
        """Copy rows to places, of (place, row); into so many other places, where given."""
        before = self.all_places
        if places is not None:
            self.most_rows = places
            self.all_places = [new_places(self.options, layer, places) for layer in self.layers]
        for layer, old, new in zip(self.layers, before, self.all_places, strict=True):
            for field in fields_of(self.options, layer):
                if field.by_page or not (field.by_row or places is not None):
                    continue
                if not field.by_row:
                    new[field.name].copy_(old[field.name])
                for place, row in moves if field.by_row else ():
                    new[field.name][place].copy_(old[field.name][row])

    def clear_places(self, places: slice) -> None:
        """A row that has left wants no fetch any more: its tokens would be looked for in the table of a dead row."""
        for layer, own in zip(self.layers, self.all_places, strict=True):
            for field in row_fields(self.options, layer):
                own[field.name][places].fill_(field.empty)

    def make_places(self, rows: int) -> None:
        """Places for so many rows, where there are fewer."""
        if rows > self.most_rows:
            self.move([(row, row) for row in range(self.batch)], rows)
            self.show()

    def take_in(self, others: PagedTiers, rows: Sequence[int]) -> None:
        """Rows of other tiers of this pool, behind those that are here: their pages are shared."""
        need = self.batch + len(rows)
        self.make_places(need)
        for place, row in enumerate(rows, self.batch):
            self.pool.share(others.pages[row])
            self.pages.append(list(others.pages[row]))
            self.rounded.append(others.rounded[row])
            for layer, own, their in zip(self.layers, self.all_places, others.all_places, strict=True):
                for field in row_fields(self.options, layer):
                    own[field.name][place].copy_(their[field.name][row])
        self.batch, self.sinks_known = need, None
        self.show()
        self.point()

    def copy(self) -> PagedTiers:
        """The same rows once more: the pages are shared, and what is measured begins anew."""
        made = PagedTiers(self, self.pool, [], self.batch)
        made.take_in(self, range(self.batch))
        return made

    def in_one_piece(self, lengths: Sequence[int]) -> Tiers:
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
        """Pages count in every row that has them."""
        parts = ((sum(map(len, self.pages)), self.pool.page_bytes), (self.most_rows, self.pool.row_bytes))
        names = dict.fromkeys(name for _, sizes in parts for name in sizes)
        return {name: sum(count * sizes.get(name, 0) for count, sizes in parts) for name in names}

    def host_bytes(self, tokens: int) -> int:
        return self.pool.page_bytes["host"] // PAGE * tokens * self.batch

    def places(self) -> list[tuple[int, torch.Size]]:
        """However many rows there are."""
        every = (
            tensor for layers in (self.pool.state, self.all_places) for state in layers for tensor in state.values()
        )
        return [(tensor.data_ptr(), tensor.shape) for tensor in every]

    @property
    def most_cursors(self) -> int:
        return self.most_rows


def row_fields(options: MethodOptions, layer: LayerShape) -> list[Field]:
    """What a row has once."""
    return [field for field in fields_of(options, layer) if field.by_row and not field.by_page]


def new_places(options: MethodOptions, layer: LayerShape, places: int) -> LayerState:
    """Empty places for so many rows, and the counts over all."""
    fields = [field for field in fields_of(options, layer) if not field.by_page]
    shapes = {field: field.shape(options, layer, places, PAGE) for field in fields}
    made = {f.name: empty(f, shape, f.dtype(options, layer), layer, 0) for f, shape in shapes.items()}
    adopt(made, layer)
    return made


def page_of(field: Field, pages: Tensor, page: int) -> Tensor:
    """[H, n, ...] of one page."""
    return pages[0, page] if field.on_host else pages[page]


def part_of(field: Field, piece: Tensor, row: int, number: int, page: Tensor) -> Tensor:
    """What a page is of a row in one piece: its `number`-th 256 tokens."""
    if field.on_host:
        return piece[number, row]
    each = page.shape[1]
    return piece[row].narrow(1, number * each, each)


def paged(tiers: Tiers, lengths: Sequence[int], pool: Pool) -> PagedTiers:
    """The rows of tiers in one piece, in pages: copies of what they have."""
    taken = iter(pool.take(sum(map(pages_for, lengths))))
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
