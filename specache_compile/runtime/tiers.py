"""The tiers of one cache: the state tensors of its layers, the effective options, and their growth."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup

from specache_compile.errors import SpecacheError
from specache_compile.kernels.memory.host_memory import allowance, grow_ahead
from specache_compile.kernels.state.cursor import runs_of
from specache_compile.kernels.state.page_table import Pages
from specache_compile.kernels.state.segments import SEGMENT, of_rows
from specache_compile.kernels.state.sinks import find_sinks
from specache_compile.methods.field import Cropped, LayerShape, LayerState
from specache_compile.methods.low_bit import LowBitOptions, window_from_host
from specache_compile.options import MethodOptions

from .break_even import stays_in_16_bits
from .memory_option import check_memory, within_memory
from .ranks import gather, ranks_here
from .state import (
    MEASURE,
    allocate,
    bucket,
    bytes_by_tier,
    copied,
    fields_of,
    host_bytes,
    moved_over,
    room,
    rows_of,
)

T = TypeVar("T")


def options_at(
    options: MethodOptions, layers: Sequence[LayerShape], batch: int, prompt: int, tokens: int
) -> MethodOptions:
    """The effective options of a cache of `tokens` tokens that began with a prompt of `prompt` tokens.

    The prompt decides the budget and the bits that fit. Caches that are too short to be compressed have the 16-bit
    options.
    """
    return effective_options(fixed_options(options, layers, batch, prompt), layers, batch, tokens)


def fixed_options(options: MethodOptions, layers: Sequence[LayerShape], batch: int, prompt: int) -> MethodOptions:
    """The options that a prompt and its number of rows determine."""
    return within_memory(options.for_prompt(prompt), layers, batch, prompt)


def effective_options(
    fixed: MethodOptions, layers: Sequence[LayerShape], batch: int, tokens: int, ranks: ProcessGroup | None = None
) -> MethodOptions:
    """The effective options for so many tokens, from `fixed_options`. Ranks decide by lengths alone, so all agree."""
    return fixed.in_16_bits if stays_in_16_bits(fixed, layers, batch, tokens, room=ranks is None) else fixed


class Tiers:
    """All tiers of one cache.

    options: the effective options (`options_at`).
    pending: the requested options, until a 16-bit cache is compressed; else None.
    frequencies: RoPE's frequencies of each layer, to center its keys when it is compressed; None if unknown.
    ranks: the process group that the model is split over; these are the KV heads of this rank.
    state: the state tensors of each layer.
    capacity: tokens that the tensors have places for.
    room: tokens, of the capacity, with host memory.
    sinks_known: a length at which every row has all its sinks; None if some are still to be found.
    table: page table of rows in pages (`paging/paged_tiers.py`); None for contiguous rows.

    Methods call their argument `settle` before a tensor moves: then no copy may be under way.
    """

    table: Tensor | None = None

    def __init__(
        self, options: MethodOptions, layers: list[LayerShape], batch: int, prompt: int, ranks: ProcessGroup | None
    ) -> None:
        fixed = fixed_options(options, layers, batch, prompt)
        check_memory(fixed, layers, batch, prompt)
        self.options = effective_options(fixed, layers, batch, prompt, ranks)
        self.pending: MethodOptions | None = fixed if fixed != self.options else None
        self.layers = layers
        self.frequencies: list[Tensor | None] = [None] * len(layers)
        self.batch = batch
        self.ranks = ranks
        self.state: list[LayerState] = []
        self.capacity = self.room = 0
        self.sinks_known: int | None = None

    @property
    def has_no_host(self) -> bool:
        """Whether tokens that have left the window are only in the low-bit tier."""
        return isinstance(self.options, LowBitOptions) and not self.options.host_tier

    def fields(self, name: str) -> list[Tensor]:
        """The state tensor `name` of each layer that has it."""
        return [layer[name] for layer in self.state if name in layer]

    def find_sinks(self, there: Tensor | None, lengths: Sequence[int], stops: Sequence[int]) -> None:
        """Set which tokens of each row are its sinks, among the cached and new ones up to its stop.

        there: as for `sinks.find_sinks`.
        """
        indices = [index for index in self.fields("sink_index") if index.shape[2]]
        if self.sinks_known is not None or not indices:
            return
        follows = there is None
        for rows, (length, stop) in self.runs(list(zip(lengths, stops, strict=True))):
            low_bit = self.options.low_bit_length(length)
            for index in indices:
                find_sinks(index[rows], None if there is None else there[rows], low_bit, stop)
            follows = follows and stop - low_bit >= indices[0].shape[2]
        # Lengths alone decide without a device sync; a fake tensor has no values.
        if follows or isinstance(indices[0], FakeTensor) or all(bool((index >= 0).all()) for index in indices):
            self.sinks_known = min(stops)

    def places(self) -> list[tuple[int, torch.Size]]:
        """Address and shape of each state tensor; fake tensors have the address 0."""
        every = (tensor for layer in self.state for tensor in layer.values())
        return [(0 if isinstance(tensor, FakeTensor) else tensor.data_ptr(), tensor.shape) for tensor in every]

    def runs(self, values: Sequence[T]) -> list[tuple[slice, T]]:
        """Slices of rows with equal values, which can be processed together, with that value."""
        return runs_of(values)

    def views(self, site: int, rows: slice) -> LayerState:
        """A layer's state that a crop reads and writes, for rows of `runs`: what is not paged, and all pairs."""
        fields = fields_of(self.options, self.layers[site])
        pairs: dict[str, Any] = {f.name: self.pairs(site, f.name, rows) for f in fields if f.has_all_pairs}
        return {**rows_of(self.state[site], [field for field in fields if not field.by_page], rows), **pairs}

    def pairs(self, site: int, name: str, rows: slice = slice(None)) -> Tensor | Pages:
        """A field that has all pairs, of these rows (`segments.py`)."""
        return of_rows(self.state[site][name], rows)

    def belong_to(self, session: Any) -> None:
        """Register the session whose copies must end before others use these buffers; nothing to do here."""

    def release_state(self) -> None:
        """Release all tensors. No copy may be under way."""
        self.state = []

    def contiguous(self, lengths: Sequence[int]) -> Tiers:
        """The rows in contiguous tiers: here these tiers."""
        return self

    def bytes_by_tier(self) -> dict[str, int]:
        return bytes_by_tier(self.options, self.layers, self.state, self.room)

    def padded_to(self, rows: int) -> list[LayerState]:
        """The state for so many rows, `most_cursors` at most; the rows after the batch are inactive."""
        assert rows == self.batch
        return self.state

    @property
    def most_cursors(self) -> int:
        """Most rows for which no tensor has to move."""
        return self.batch

    def host_bytes(self, tokens: int) -> int:
        """Bytes of so many tokens' pairs in the host tier, of all rows."""
        segments = (host.nbytes // (host.shape[0] * host.shape[1]) for host in self.fields("host"))
        return sum(segments) // SEGMENT * self.batch * tokens

    def move_over(
        self, tokens: int, lengths: Sequence[int], padding: Tensor | None, settle: Callable[[], object]
    ) -> bool:
        """Compress a 16-bit cache to the requested options if `tokens` are enough to benefit. Returns whether anything
        changed.

        The cached tokens (`lengths`) are compressed layer by layer. The next call resumes an interrupted compression.
        """
        if self.pending is None or not self.state:
            return False
        grows = tokens > self.capacity and self.ranks is None  # ranks decide by lengths alone
        if stays_in_16_bits(self.pending, self.layers, self.batch, tokens, room=grows):
            return False
        return self.move_now(lengths, padding, settle)

    def move_now(self, lengths: Sequence[int], padding: Tensor | None, settle: Callable[[], object]) -> bool:
        """Compress at any length."""
        assert isinstance(self.pending, LowBitOptions)
        settle()
        for number, (layer, frequencies) in enumerate(zip(self.layers, self.frequencies, strict=True)):
            more = (lengths, padding, frequencies, self.room)
            self.state[number] = moved_over(self.state[number], self.pending, layer, *more)
        self.options, self.pending = self.pending, None
        return True

    def reserve(self, lengths: Sequence[int], new: int, settle: Callable[[], object]) -> bool:
        """Allocate room for so many new tokens of each row, and keep the contents. Returns whether a tensor has
        changed.

        Layer by layer, so that at most one layer's tiers exist twice. SpecacheError, before anything has changed, if
        the host tier would exceed its budget.
        """
        tokens = max(lengths) + new
        capacity, backed = max(self.capacity, bucket(tokens)), max(self.room, room(tokens))
        if (capacity, backed) == (self.capacity, self.room):
            return False
        self.check_host_memory(backed, backed)
        settle()
        grows = self.capacity > 0
        for number, layer in enumerate(self.layers):
            old = self.state[number] if grows else None
            made = allocate(self.options, layer, self.batch, capacity, backed, old)
            self.state[number : number + 1] = [made]
        self.capacity, self.room = capacity, backed
        if grows and self.layers[0].device.type == "cuda":
            self.reserve_ahead(room(self.room + 1))
        return True

    def reserve_ahead(self, tokens: int) -> None:
        """Pin the host tier's memory for so many tokens on a thread.

        Not if the tier would exceed its budget, nor if other ranks share the budget.
        """
        held, needed = (host_bytes(self.options, self.layers, self.batch, size) for size in (self.room, tokens))
        if self.ranks is None and needed <= allowance(held, self.options.host_memory):
            for host in self.fields("host"):
                grow_ahead(host, tokens // SEGMENT)

    def check_host_memory(self, backed: int, tokens: int) -> None:
        """SpecacheError if the host tier would exceed its budget with room for `backed` tokens, here or on another
        rank.

        tokens: the number that the error names.
        """
        held = sum(host[: self.room // SEGMENT].nbytes for host in self.fields("host"))
        needed = host_bytes(self.options, self.layers, self.batch, backed)
        given = self.options.host_memory
        here = ranks_here(self.ranks)
        every = gather(self.ranks, (needed, allowance(held, given, here), here))
        needed, allowed, here = max(every, key=lambda rank: rank[0] - rank[1])
        if needed > allowed:
            raise no_host_memory(needed, allowed, tokens, self.batch, given, here)

    def crop(self, lengths: Sequence[int], before: Sequence[int]) -> None:
        """Keep the first tokens of each row, of `before`, by each field's `on_crop`."""
        if self.sinks_known is not None and min(lengths) < self.sinks_known:
            self.sinks_known = None
        for rows, (length, cached) in self.runs(list(zip(lengths, before, strict=True))):
            cropped = Cropped(length, *(self.options.low_bit_length(n) for n in (length, cached)))
            for site, layer in enumerate(self.layers):
                views = self.views(site, rows)
                for field in fields_of(self.options, layer):
                    if field.on_crop is not None:
                        field.on_crop(views, cropped)

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows, in that order."""
        for number, layer in enumerate(self.layers):
            self.state[number] = copied(self.state[number], self.options, layer, self.room, rows)
        self.batch = rows.numel()

    def copy(self) -> Tiers:
        """A copy of the tiers; measurements start at zero."""
        other = copy.copy(self)
        pairs = zip(self.state, self.layers, strict=True)
        other.state = [copied(state, self.options, layer, self.room) for state, layer in pairs]
        for layer, state in zip(other.layers, other.state, strict=True):
            for field in fields_of(other.options, layer):
                if field.tier == MEASURE:
                    state[field.name].zero_()
        return other

    def undo_step(self, lengths: Sequence[int]) -> None:
        """Undo an unfinished step after these tokens of each row.

        Slots are emptied, and tokens that the step moved out of the window come back from the host. Sinks are found
        again, since the step may have set wrong ones.
        """
        self.sinks_known = None
        for slot_index in self.fields("slot_index"):
            slot_index.fill_(-1)
        if isinstance(self.options, LowBitOptions) and not self.has_no_host:
            for site in range(len(self.state)):  # empty before the first step
                for rows, length in self.runs(lengths):
                    window_from_host(self.views(site, rows), self.options.low_bit_length(length), length)


def no_host_memory(needed: int, allowed: int, tokens: int, batch: int, given: int | None, ranks: int) -> SpecacheError:
    limit = "half of what is free" if given is None else "option host_memory"
    if ranks > 1:
        limit += f", shared by the {ranks} ranks of this machine"
    return SpecacheError(
        f"the host tier would need {needed / 2**30:.2f} GiB for {tokens:,} tokens x batch {batch}, more than its "
        f"budget of {allowed / 2**30:.2f} GiB ({limit}). The cache is unchanged. Lower the batch or the context, free "
        "host memory, or raise host_memory (bytes)."
    )
