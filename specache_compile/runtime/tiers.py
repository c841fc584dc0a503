"""The tiers of one cache: the state tensors of its layers, the effective options, and their growth."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from specache_compile.errors import RECOMPILE_LIMIT, SpecacheError, no_host_tier
from specache_compile.kernels.memory.host_memory import allowance
from specache_compile.kernels.movement import copy_stream
from specache_compile.kernels.state.cursor import runs_of
from specache_compile.kernels.state.page_table import PAGE, Pages, tokens_of
from specache_compile.kernels.state.sinks import find_sinks
from specache_compile.kernels.state.stored_pairs import decoded
from specache_compile.methods.field import Cropped, LayerShape, LayerState
from specache_compile.methods.low_bit_tier import window_from_host
from specache_compile.options import MethodOptions
from specache_compile.paging.pool import PagePool, pages_for

from .break_even import stays_in_16_bits
from .ranks import gather, ranks_here
from .state import bucket, fields_of, page_bytes, pages_of_rows, room, row_fields, row_state, tier_bytes

# Numbers of buffers.
NUMBERS = itertools.count()


def effective_options(
    fixed: MethodOptions, layers: Sequence[LayerShape], batch: int, tokens: int, ranks: ProcessGroup | None = None
) -> MethodOptions:
    """The effective options for so many tokens. Ranks decide by lengths alone, so all agree.

    fixed: from `MethodOptions.for_prompt`.
    """
    return fixed.in_16_bits if stays_in_16_bits(fixed, layers, batch, tokens, room=ranks is None) else fixed


class Tiers:
    """All tiers of one cache. Tensors that grow with the tokens are in pages of a pool; others have a slice per row.

    options: the effective options (`effective_options`).
    pending: the requested options, until a 16-bit cache is compressed; else None.
    frequencies: RoPE's frequencies of each layer, to center its keys when it is compressed; None if unknown.
    ranks: the process group that the model is split over; these are the KV heads of this rank.
    pool: its pages; None before the first step.
    pages: page numbers of each row. Copy-on-write: a row that writes to a shared page first gets its own copy.
    rounded: for each row, the tokens up to which its codes may differ from those of rows that share its pages. A crop
        makes the next steps compute them again, perhaps from rounded pairs or without an earlier step's mask.
    table: page table of the rows, int64 [B, C/256] on the CPU; entries without tokens are 0.
    capacity: C, tokens that the table has entries for.
    most_rows: rows that the buffers are allocated for, just the batch without a null page. Row b has slice b; slices
        without a row select no pairs.
    all_rows: of each layer, the buffers for all rows.
    views_by_rows: the state of the first rows, by their number.
    sinks_known: a length at which every row has all its sinks. None: some are still to be found.
    moves: a number of the present buffers of rows.
    """

    def __init__(
        self, options: MethodOptions, layers: list[LayerShape], batch: int, prompt: int, ranks: ProcessGroup | None
    ) -> None:
        fixed = options.for_prompt(prompt)
        self.options = effective_options(fixed, layers, batch, prompt, ranks)
        self.pending: MethodOptions | None = fixed if fixed != self.options else None
        self.layers = layers
        self.frequencies: list[Tensor | None] = [None] * len(layers)
        self.ranks = ranks
        self.reset(batch)

    def reset(self, batch: int) -> None:
        """Reset to `batch` rows without pages or pool, and release all tensors. No copy may be under
        way."""
        self.pool: PagePool | None = None
        self.pages: list[list[int]] = [[] for _ in range(batch)]
        self.batch, self.rounded = batch, [0] * batch
        self.sinks_known: int | None = None
        self.capacity = 0
        self.table = torch.zeros(batch, 0, dtype=torch.int64, device="cpu")
        self.views_by_rows: dict[int, list[LayerState]] = {}
        self.set_rows([], batch)

    def join_pool(self, pool: PagePool) -> None:
        """Register with a pool. The finaliser only appends to `pool.died`, since any thread may run it."""
        weakref.finalize(self, pool.died.append, None)
        with pool.lock:  # others may list the tiers
            pool.tiers.add(self)
        self.pool = pool

    @torch.inference_mode(False)
    def in_pool(self, pool: PagePool, slices: int, rows: list[LayerState] | None = None) -> Tiers:
        """Return tiers without rows, with the pool's options and layers.

        rows: their buffers, for `slices` rows; None: empty ones.
        """
        made = copy.copy(self)
        made.reset(0)
        made.options, made.layers = pool.options, pool.layers
        made.join_pool(pool)
        made.set_pages([], [], 0 if pool.first else self.capacity)
        made.set_rows(rows or [row_state(pool.options, layer, slices, made.capacity) for layer in made.layers], slices)
        return made

    def set_pages(self, pages: list[list[int]], rounded: list[int], capacity: int = 0) -> None:
        """Replace the rows' pages, in one statement: an interrupted change has happened or not."""
        capacity = max(capacity, self.capacity_for(max(map(len, pages), default=0)))
        rows = [[*row, *[0] * (capacity // PAGE - len(row))] for row in pages]
        table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(rows), capacity // PAGE)
        self.pages, self.rounded, self.table, self.capacity, self.batch = pages, rounded, table, capacity, len(pages)

    @property
    def lock(self) -> contextlib.AbstractContextManager[object]:
        """Held while pages are accessed: a step of another session of the pool may move them."""
        return contextlib.nullcontext() if self.pool is None else self.pool.lock

    def drain(self) -> None:
        """Wait for all copies, and for a step of another session that may move the pages."""
        with self.lock:
            copy_stream.drain(self.layers[0].device)

    @property
    def state(self) -> list[LayerState]:
        """The state tensors of each layer; none before the first step."""
        return self.padded_to(self.batch) if self.all_rows else []

    def fields(self, name: str) -> list[Tensor]:
        """The state tensor `name` of each layer that has it."""
        return [layer[name] for layer in self.state if name in layer]

    def padded_to(self, rows: int) -> list[LayerState]:
        """The state for so many rows, `most_rows` at most; the rows after the batch are inactive."""
        assert self.pool is not None
        if rows not in self.views_by_rows:
            views = list[LayerState]()
            for layer, own, pages in zip(self.layers, self.all_rows, self.pool.state, strict=True):
                by_row = {field.name for field in row_fields(self.options, layer)}
                views.append({**{name: x[:rows] if name in by_row else x for name, x in own.items()}, **pages})
            self.views_by_rows[rows] = views  # whole, also after an interrupt
        return self.views_by_rows[rows]

    def set_rows(self, rows: list[LayerState], slices: int) -> None:
        """Use other buffers for all rows, with so many slices."""
        self.all_rows, self.most_rows, self.views_by_rows, self.moves = rows, slices, {}, next(NUMBERS)

    def find_sinks(self, padding: Tensor | None, lengths: Sequence[int], stops: Sequence[int]) -> None:
        """Set which tokens of each row are its sinks, among the cached and new ones up to its stop.

        padding: [B, 1, 1, C], True for tokens; None if there is none.
        """
        indices = [] if self.sinks_known is not None else [x for x in self.fields("sink_index") if x.shape[2]]
        if not indices:
            return
        follows = padding is None
        for rows, (length, stop) in runs_of(list(zip(lengths, stops, strict=True))):
            low_bit = self.options.low_bit_length(length)
            for index in indices:
                find_sinks(index[rows], None if padding is None else padding[rows, 0, 0], low_bit, stop)
            follows = follows and stop - low_bit >= indices[0].shape[2]
        # Lengths alone decide without a device sync; a fake tensor has no values.
        if follows or isinstance(indices[0], FakeTensor) or all(bool((index >= 0).all()) for index in indices):
            self.sinks_known = min(stops)

    @property
    def moved(self) -> tuple[int, ...]:
        """Changes when a tensor has moved, by a step of these tiers or of others of the pool."""
        return self.moves, 0 if self.pool is None else self.pool.moves

    def views(self, site: int, rows: slice) -> LayerState:
        """A layer's state that a crop reads and writes, for rows of `runs_of`: what is not paged, and all pairs."""
        state, fields = self.state[site], fields_of(self.options, self.layers[site])
        found: dict[str, Any] = {
            field.name: state[field.name][rows] if field.by_row else state[field.name]
            for field in fields
            if not field.by_page
        }
        return {**found, **{field.name: self.pairs(site, field.name, rows) for field in fields if field.has_all_pairs}}

    def pairs(self, site: int, name: str, rows: slice = slice(None)) -> Pages:
        """A field that is in pages, of these rows."""
        return Pages(self.state[site][name], self.table[rows])

    def all_pairs(self, site: int, lengths: Sequence[int], columns: int) -> Tensor:
        """A layer's pairs by Hugging Face's columns [B, H, n, 2, d]; shorter rows have zeros in front.

        They are on the device if the low-bit tier has 16 bits, else where the method has all pairs.
        """
        layer, found = self.layers[site], list[Tensor]()
        options: Any = self.options
        whole = next((field.name for field in fields_of(options, layer) if field.has_all_pairs), "")
        exact = options.has_low_bit_tier and not options.layout.is_quantised
        if not whole and not exact:
            raise evicted(options.method) if options.host_tier else no_host_tier("a copy of its keys and values")
        for rows, length in runs_of(lengths):
            if exact:
                recent, low_bit = self.state[site]["recent"][rows], options.low_bit_length(length)
                places = torch.arange(low_bit, length, device=recent.device) % recent.shape[2]
                old = tokens_of(self.pairs(site, "codes", rows), 0, low_bit).unflatten(3, (2, -1))
                pairs = torch.cat([old, recent[:, :, places]], 2)
            else:
                pairs = decoded(tokens_of(self.pairs(site, whole, rows), 0, length), layer.dtype, layer.head_dim)
            found.append(pairs if length == columns else pad(pairs, (0, 0, 0, 0, columns - length, 0)))
        return found[0] if len(found) == 1 else torch.cat(found)

    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes of each tier: of the whole pool, if its pages are of these rows alone; else of the rows' pages, where a
        shared page counts once for each row."""
        if self.pool is None:
            return {}
        pages = backed = sum(map(len, self.pages))
        if not self.pool.first and self.pool.counts.total() == pages:
            pages, backed = self.pool.pages, self.pool.backed
        return tier_bytes(self.options, self.layers, pages, backed, self.most_rows, self.capacity)

    def host_bytes(self, tokens: int) -> int:
        """Bytes of so many pairs in the host tier."""
        return 0 if self.pool is None else self.pool.page_bytes["host"] // PAGE * tokens

    def compresses_at(self, tokens: int) -> bool:
        """Whether so many tokens are enough for a 16-bit cache to benefit from compression."""
        if self.pending is None or self.pool is None:
            return False
        grows = tokens > self.capacity and self.ranks is None  # ranks decide by lengths alone
        return not stays_in_16_bits(self.pending, self.layers, self.batch, tokens, room=grows)

    def reserve(self, lengths: Sequence[int], new: int, masked: bool = True) -> None:
        """Allocate the pages that each row's new tokens need, and copies of shared pages that it will write to.

        masked: whether the step hides some tokens. SpecacheError, before anything has changed, if the host tier would
        exceed its budget or the pool has too few pages.
        """
        missing = [max(0, pages_for(n + new) - len(row)) for n, row in zip(lengths, self.pages, strict=True)]
        with self.lock:
            shared = self.shared_pages(lengths, masked)
            if not shared and not any(missing) and self.all_rows:
                return
            self.grow_pool(max(lengths) + new, len(shared) + sum(missing))
            assert self.pool is not None
            capacity = self.capacity_for(max(len(row) + more for row, more in zip(self.pages, missing, strict=True)))
            self.grow_rows(capacity)
            fresh = iter(self.pool.allocate(len(shared) + sum(missing)))
            pages = [list(row) for row in self.pages]
            if shared:
                self.drain()
            for row, number in shared:
                pages[row][number] = next(fresh)
                self.pool.copy(self.pages[row][number], pages[row][number])
            for own, more in zip(pages, missing, strict=True):
                own.extend(itertools.islice(fresh, more))
            self.set_pages(pages, self.rounded, capacity)

    def shared_pages(self, lengths: Sequence[int], masked: bool) -> list[tuple[int, int]]:
        """The shared pages (row, number) that rows will write to. The last row that has a page keeps it."""
        counts = Counter[int]() if self.pool is None else self.pool.counts
        found, copied = list[tuple[int, int]](), Counter[int]()
        for row, (length, pages) in enumerate(zip(lengths, self.pages, strict=True)):
            for number in range(self.first_written(row, length, masked), len(pages)):
                if counts[pages[number]] - copied[pages[number]] > 1:
                    copied[pages[number]] += 1
                    found.append((row, number))
        return found

    def grow_pool(self, tokens: int, number: int) -> None:
        """Create the pool for rows of so many tokens, or grow it if it lacks so many free pages. If others hold pages
        too, there are more. A batch's pool grows by itself."""
        pool, (pages, backed) = self.pool, pages_of_rows(self.batch, tokens)
        if pool is None:
            self.check_host_memory(backed, room(tokens))
            self.join_pool(PagePool(self.options, self.layers, pages, backed))
        elif not pool.first and (missing := pool.missing(number)):
            if pool.backed + missing > backed:
                pages, backed = pool.larger(missing)
            self.check_host_memory(backed, room(tokens))
            pool.grow_to(pages, backed)

    def grow_rows(self, capacity: int) -> None:
        """Allocate the rows' buffers, or move them to larger ones if their size depends on the capacity."""
        if self.all_rows and (self.options.capacity_is_free or capacity <= self.capacity):
            return
        grown = [row_state(self.options, layer, self.most_rows, capacity) for layer in self.layers]
        if self.all_rows:
            self.drain()
            for old, new in zip(self.all_rows, grown, strict=True):
                for name, tensor in old.items():
                    new[name][tuple(map(slice, tensor.shape))].copy_(tensor)
        self.set_rows(grown, self.most_rows)

    def capacity_for(self, pages: int) -> int:
        """Tokens in the table of a row with so many pages. A batch records a step for each power of two; the table of
        other rows never shrinks."""
        assert self.pool is not None
        if self.pool.first:
            return PAGE << max(pages - 1, 0).bit_length()
        return max(self.capacity, bucket(pages * PAGE))

    def first_written(self, row: int, length: int, masked: bool, cropped_from: int = 0) -> int:
        """The first page in which a row writes something that other rows with its tokens do not have. The low-bit codes
        of a full page are the same for all of them, once the center is set, unless a step hides tokens.

        cropped_from: the length before a crop that is still to come.
        """
        if not self.options.has_low_bit_tier:
            return length // PAGE
        low_bit = self.options.low_bit_length(length)
        rounded = max(1, self.rounded_after(row, length, max(length, cropped_from)))
        return (low_bit if masked or low_bit < rounded else length) // PAGE

    def rounded_after(self, row: int, length: int, cached: int) -> int:
        """`rounded` of a row after a crop from `cached` tokens to `length`."""
        low_bit, was = (self.options.low_bit_length(n) for n in (length, cached))
        return min(length, max(was, self.rounded[row])) if low_bit < was else self.rounded[row]

    def pages_needed(self, row: int, length: int, longest: int) -> int:
        """Pages that a row of `length` tokens may still allocate until it has `longest`, copies of shared ones
        included."""
        assert self.pool is not None
        counts, writes = self.pool.counts, self.pages[row][self.first_written(row, length, masked=False) :]
        shared = sum(counts[page] > 1 for page in writes)
        return max(0, pages_for(longest) - len(self.pages[row])) + shared

    def check_host_memory(self, backed: int, tokens: int) -> None:
        """SpecacheError if the host tier would exceed its budget with so many pages, here or on another rank.

        tokens: the number that the error names.
        """
        page = page_bytes(self.options, self.layers)["host"]
        held, needed = (0 if self.pool is None else self.pool.backed) * page, backed * page
        given = self.options.host_memory
        here = ranks_here(self.ranks)
        every = gather(self.ranks, (needed, allowance(held, given, here), here))
        needed, allowed, here = max(every, key=lambda rank: rank[0] - rank[1])
        if needed > allowed:
            limit = "half of what is free" if given is None else "option host_memory"
            if here > 1:
                limit += f", shared by the {here} ranks of this machine"
            raise SpecacheError(
                f"the host tier would need {needed:,} bytes for {tokens:,} tokens x batch {self.batch}, more "
                f"than its budget of {allowed:,} bytes ({limit}). The cache is unchanged. Lower the batch or "
                "the context, free host memory, or raise host_memory."
            )

    def crop(self, lengths: Sequence[int], before: Sequence[int]) -> None:
        """Keep the first tokens of each row, of `before`, by each field's `on_crop`, and free pages without tokens."""
        if self.sinks_known is not None and min(lengths) < self.sinks_known:
            self.sinks_known = None
        with self.lock:
            for rows, (length, cached) in runs_of(list(zip(lengths, before, strict=True))):
                cropped = Cropped(length, *(self.options.low_bit_length(n) for n in (length, cached)))
                for site, layer in enumerate(self.layers):
                    views = self.views(site, rows)
                    for field in fields_of(self.options, layer):
                        if field.on_crop is not None:
                            field.on_crop(views, cropped)
            every = enumerate(zip(lengths, before, strict=True))
            rounded = [self.rounded_after(row, length, cached) for row, (length, cached) in every]
            self.set_pages([row[: pages_for(n)] for row, n in zip(self.pages, lengths, strict=True)], rounded)

    def selected(self, rows: Sequence[int]) -> Tiers:
        """Tiers of these batch rows, in that order, which share the pages. In a pool with a null page they have the
        same buffers if no row moves to an earlier slice that is still read."""
        assert self.pool is not None
        moves = list(enumerate(rows))
        moved = [(place, row) for place, row in moves if place != row]
        if self.pool.first and len(rows) <= self.most_rows and all(row >= len(rows) for _, row in moved):
            self.copy_rows(self.all_rows, self.all_rows, moved)
            made = self.in_pool(self.pool, self.most_rows, self.all_rows)
            made.moves = self.moves
        else:
            made = self.in_pool(self.pool, len(rows), self.more_rows(len(rows)))
            made.copy_rows(self.all_rows, made.all_rows, moves)
        made.append_pages([(self, row) for row in rows])
        made.sinks_known = self.sinks_known
        return made

    def more_rows(self, slices: int) -> list[LayerState]:
        """Empty buffers for so many rows, with the counts over all rows."""
        made = [row_state(self.options, layer, slices, self.capacity) for layer in self.layers]
        for layer, old, new in zip(self.layers, self.all_rows, made, strict=True):
            by_row = {field.name for field in row_fields(self.options, layer)}
            new.update({name: count for name, count in old.items() if name not in by_row})
        return made

    def copy_rows(self, source: list[LayerState], target: list[LayerState], moves: Sequence[tuple[int, int]]) -> None:
        """Copy rows to slices, given as (slice, row)."""
        if not moves:
            return
        numbers = torch.tensor(moves, device="cpu")
        on = functools.cache(lambda device: numbers.to(device).unbind(1))
        for layer, old, new in zip(self.layers, source, target, strict=True):
            for field in row_fields(self.options, layer):
                places, rows = on(old[field.name].device)
                new[field.name].index_copy_(0, places, old[field.name].index_select(0, rows))

    def clear_inactive(self) -> None:
        """Make the slices after the batch select no pairs: an inactive row has no page table to find them in."""
        if self.batch == self.most_rows:
            return
        for layer, own in zip(self.layers, self.all_rows, strict=True):
            for field in row_fields(self.options, layer):
                own[field.name][self.batch :].fill_(field.empty)

    def reserve_rows(self, rows: int) -> None:
        """Allocate buffers for so many rows, if there are fewer."""
        if rows > self.most_rows:
            made = self.more_rows(rows)
            self.copy_rows(self.all_rows, made, [(row, row) for row in range(self.batch)])
            self.set_rows(made, rows)

    def append_rows(self, rows: Sequence[tuple[Tiers, int]]) -> None:
        """Append rows of other tiers with the same options."""
        self.reserve_rows(self.batch + len(rows))
        for source in dict.fromkeys(others for others, _ in rows):
            moves = [(place, row) for place, (others, row) in enumerate(rows, self.batch) if others is source]
            self.copy_rows(source.all_rows, self.all_rows, moves)
        self.append_pages(rows)

    def append_pages(self, rows: Sequence[tuple[Tiers, int]]) -> None:
        """Append rows whose buffers are there. They share their pages of this pool; those of another are copied."""
        assert self.pool is not None
        with self.pool.lock:
            fresh = iter(self.pool.allocate(sum(len(x.pages[row]) for x, row in rows if x.pool is not self.pool)))
            pages = list(self.pages)
            for others, row in rows:
                pages.append(others.pages[row])
                if others.pool is not self.pool:
                    pages[-1] = list(itertools.islice(fresh, len(others.pages[row])))
                    with others.lock:
                        for source, target in zip(others.pages[row], pages[-1], strict=True):
                            self.pool.copy(source, target, others.pool)
            self.set_pages(pages, [*self.rounded, *(others.rounded[row] for others, row in rows)])
        self.sinks_known = None

    def copy(self) -> Tiers:
        """A copy of the rows, which shares their pages; measurements start at zero. Ranks copy the pages: when a pool
        grows must depend on lengths alone."""
        rows = [(self, row) for row in range(self.batch)]
        return joined(rows, None if self.ranks is None else self.own_pool(self.options))

    def own_pool(self, options: MethodOptions) -> PagePool:
        """A new pool for these rows under such options."""
        longest = PAGE * max(map(len, self.pages), default=0)
        return PagePool(options, self.layers, *pages_of_rows(self.batch, longest))

    def under(self, options: MethodOptions, lengths: Sequence[int]) -> Tiers:
        """Empty tiers of the same rows, of these lengths, under other options, with their own pool."""
        made = self.in_pool(self.own_pool(options), self.batch)
        made.set_pages([[] for _ in lengths], [0] * self.batch)
        made.reserve(lengths, 0)
        return made

    def undo_step(self, lengths: Sequence[int], new: int) -> None:
        """Undo an unfinished step of at most `new` tokens after these tokens of each row.

        Slots are emptied. Window tokens that the new ones overwrite come back from the host: none for one new token.
        Sinks are found again, since the step may have set wrong ones.
        """
        self.sinks_known = None
        for slot_index in self.fields("slot_index"):
            slot_index.fill_(-1)
        options: Any = self.options
        if options.has_low_bit_tier and options.host_tier:
            for site in range(len(self.state)):  # empty before the first step
                for rows, length in runs_of(lengths):
                    low_bit, overwritten = options.low_bit_length(length), min(length, length + new - options.window)
                    window_from_host(self.views(site, rows), low_bit, max(low_bit, overwritten))
        if self.options.bits_on_host < 16:
            self.rounded = list(lengths)


def joined(rows: Sequence[tuple[Tiers, int]], pool: PagePool | None = None) -> Tiers:
    """Tiers of these rows in a pool; None: the pool of the first row."""
    first = rows[0][0]
    pool = pool or first.pool
    assert pool is not None
    made = first.in_pool(pool, len(rows))
    made.append_rows(rows)
    return made


def evicted(method: str) -> SpecacheError:
    return SpecacheError(
        f"method {method!r} keeps only the pairs that its policy chose, different ones for each head, so the cache has "
        "no plain copy and cannot be continued uncompiled. Use a method that keeps all pairs: specache, kivi, kcache, "
        f"offload or full. In the middle of a generation: {RECOMPILE_LIMIT}."
    )
