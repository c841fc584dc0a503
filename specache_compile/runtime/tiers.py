"""The tiers behind one cache: the state tensors of its layers, under the options in force, and how they grow."""

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
from specache_compile.kernels.state.segments import SEGMENT
from specache_compile.kernels.state.sinks import find_sinks
from specache_compile.methods.field import Cropped, LayerShape, LayerState
from specache_compile.methods.low_bit import LowBitOptions, window_from_host
from specache_compile.options import MethodOptions

from .break_even import stays_in_16_bits
from .memory_option import check_memory, within_memory
from .ranks import everyones, ranks_here
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
    """The options in force for a cache of `tokens` tokens that began with a prompt of `prompt` tokens.

    The prompt decides the budget, and the bits that fit. Where the tokens are too few to gain, the options are the
    16-bit ones.
    """
    return in_force(fixed_options(options, layers, batch, prompt), layers, batch, tokens)


def fixed_options(options: MethodOptions, layers: Sequence[LayerShape], batch: int, prompt: int) -> MethodOptions:
    """The options as a prompt and its rows fix them."""
    return within_memory(options.for_prompt(prompt), layers, batch, prompt)


def in_force(
    fixed: MethodOptions, layers: Sequence[LayerShape], batch: int, tokens: int, ranks: ProcessGroup | None = None
) -> MethodOptions:
    """The options that hold for so many tokens, from those that a prompt has fixed.

    Ranks decide alike, by lengths alone.
    """
    return fixed.in_16_bits if stays_in_16_bits(fixed, layers, batch, tokens, room=ranks is None) else fixed


class Tiers:
    """All tiers of one cache, whatever of them is in use.

    options: those in force (`options_at`).
    pending: those that the tiers have yet to move over to; None where they are in force.
    frequencies: of each layer those of RoPE, by which its keys are centered when they move over; None where none has
        been seen.
    ranks: the process group that the model is split over, of whose KV heads these are this rank's.
    state: the state tensors of each layer.
    capacity: tokens that there are places for.
    room: tokens that the host tier has memory for, of the capacity.
    allocated: capacity and room that the state's tensors have.
    sinks_known: tokens among which every row has all its sinks; None where one has yet to find some.
    table: of rows whose tokens are in pages, where (`paging/paged_tiers.py`); None: in one piece.

    `settle`, where a method takes it, is called before a tensor moves: no copy may be under way then.
    """

    table: Tensor | None = None

    def __init__(
        self, options: MethodOptions, layers: list[LayerShape], batch: int, prompt: int, ranks: ProcessGroup | None
    ) -> None:
        fixed = fixed_options(options, layers, batch, prompt)
        check_memory(fixed, layers, batch, prompt)
        self.options = in_force(fixed, layers, batch, prompt, ranks)
        self.pending: MethodOptions | None = fixed if fixed != self.options else None
        self.layers = layers
        self.frequencies: list[Tensor | None] = [None] * len(layers)
        self.batch = batch
        self.ranks = ranks
        self.state: list[LayerState] = []
        self.capacity = self.room = 0
        self.allocated = (0, 0)
        self.sinks_known: int | None = None

    @property
    def has_no_host(self) -> bool:
        """Whether the low-bit tier is all that there is of the tokens behind the window."""
        return isinstance(self.options, LowBitOptions) and not self.options.host_tier

    def fields(self, name: str) -> list[Tensor]:
        """One state tensor of each layer that has it."""
        return [layer[name] for layer in self.state if name in layer]

    def find_sinks(self, there: Tensor | None, lengths: Sequence[int], stops: Sequence[int]) -> None:
        """Have each layer know which of a row's tokens are its sinks, of the cached ones, and the new ones up to its
        stop.

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
        # The device is not asked what follows of lengths alone, and a fake has no answer.
        if follows or isinstance(indices[0], FakeTensor) or all(bool((index >= 0).all()) for index in indices):
            self.sinks_known = min(stops)

    def places(self) -> list[tuple[int, torch.Size]]:
        """Where each state tensor lies, and how large it is; fakes lie nowhere."""
        every = (tensor for layer in self.state for tensor in layer.values())
        return [(0 if isinstance(tensor, FakeTensor) else tensor.data_ptr(), tensor.shape) for tensor in every]

    def runs(self, values: Sequence[T]) -> list[tuple[slice, T]]:
        """The rows that can be gone through together, with what each of them has."""
        return runs_of(values)

    def views(self, site: int, rows: slice) -> LayerState:
        """What a crop reads and writes of a layer, of rows as `runs` gives them."""
        return rows_of(self.state[site], fields_of(self.options, self.layers[site]), rows)

    def pairs(self, site: int, name: str) -> Any:
        """A field that has all pairs (`segments.py`)."""
        return self.state[site][name]

    def belong_to(self, session: Any) -> None:
        """What waits for its copies where others may use what these tiers have: nobody does."""

    def release_state(self) -> None:
        """Have nothing any more; no copy is under way."""
        self.state = []

    def contiguous(self, lengths: Sequence[int]) -> Tiers:
        """The tiers of rows of these lengths as they are where nothing is in pages: these."""
        return self

    def bytes_by_tier(self) -> dict[str, int]:
        return bytes_by_tier(self.options, self.layers, self.state, self.room)

    def filled_up(self, rows: int) -> list[LayerState]:
        """The state with places of so many rows: of `most_cursors` at most, those that are here first."""
        assert rows == self.batch
        return self.state

    @property
    def most_cursors(self) -> int:
        """Rows that there may be while nothing moves."""
        return self.batch

    def host_bytes(self, tokens: int) -> int:
        """Bytes of so many tokens' pairs in the host tier, of all rows."""
        return sum(host[0].nbytes // SEGMENT * tokens for host in self.fields("host"))

    def move_over(
        self, tokens: int, lengths: Sequence[int], padding: Tensor | None, settle: Callable[[], object]
    ) -> bool:
        """From 16 bits to the tiers that were asked for, where `tokens` are enough to gain.

        The cached tokens, of each row so many, move layer by layer. A move that was stopped half way goes on from there
        in the next call. Returns whether anything moved.
        """
        if self.pending is None or not self.state:
            return False
        grows = tokens > self.capacity and self.ranks is None  # ranks decide alike, by lengths alone
        if stays_in_16_bits(self.pending, self.layers, self.batch, tokens, room=grows):
            return False
        return self.move_now(lengths, padding, settle)

    def move_now(self, lengths: Sequence[int], padding: Tensor | None, settle: Callable[[], object]) -> bool:
        """Likewise, whether there is a gain or not."""
        assert isinstance(self.pending, LowBitOptions)
        settle()
        for number, (layer, frequencies) in enumerate(zip(self.layers, self.frequencies, strict=True)):
            more = (lengths, padding, frequencies, self.allocated[1])
            self.state[number] = moved_over(self.state[number], self.pending, layer, *more)
        self.options, self.pending = self.pending, None
        return True

    def reserve(self, lengths: Sequence[int], new: int, settle: Callable[[], object]) -> bool:
        """Make room for so many new tokens behind those of each row; what is there stays. Returns whether a tensor has
        changed.

        Layer by layer, so that one layer's tiers at most are there twice. SpecacheError, before anything has changed,
        where the host tier would outgrow its budget.
        """
        tokens = max(lengths) + new
        self.capacity, self.room = max(self.capacity, bucket(tokens)), max(self.room, room(tokens))
        if self.allocated == (self.capacity, self.room):
            return False
        try:
            self.check_host_memory(self.room)
        except SpecacheError:
            self.capacity, self.room = self.allocated
            raise
        settle()
        grows = self.allocated[0] > 0
        for number, layer in enumerate(self.layers):
            old = self.state[number] if grows else None
            made = allocate(self.options, layer, self.batch, self.capacity, self.room, old)
            self.state[number : number + 1] = [made]
        self.allocated = (self.capacity, self.room)
        if grows and self.layers[0].device.type == "cuda":
            self.reserve_ahead(room(self.room + 1))
        return True

    def reserve_ahead(self, tokens: int) -> None:
        """Have the host tier's memory for so many tokens pinned on a thread.

        Not where the tier would outgrow its budget, nor where other ranks share the budget.
        """
        held, needed = (host_bytes(self.options, self.layers, self.batch, size) for size in (self.room, tokens))
        if self.ranks is None and needed <= allowance(held, self.options.host_memory):
            for host in self.fields("host"):
                grow_ahead(host, tokens // SEGMENT)

    def check_host_memory(self, tokens: int) -> None:
        """SpecacheError where the host tier would outgrow its budget at this room, here or on another rank.

        tokens: how many the error names.
        """
        held = sum(host[: self.allocated[1] // SEGMENT].nbytes for host in self.fields("host"))
        needed = host_bytes(self.options, self.layers, self.batch, self.room)
        asked = self.options.host_memory
        here = ranks_here(self.ranks)
        every = everyones(self.ranks, (needed, allowance(held, asked, here), here))
        needed, allowed, here = max(every, key=lambda rank: rank[0] - rank[1])
        if needed > allowed:
            raise no_host_memory(needed, allowed, tokens, self.batch, asked, here)

    def crop(self, lengths: Sequence[int], before: Sequence[int]) -> None:
        """Keep of each row the first of `before` tokens, each field as it says."""
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
        """The same tiers once more; what is measured of them begins anew."""
        other = copy.copy(self)
        pairs = zip(self.state, self.layers, strict=True)
        other.state = [copied(state, self.options, layer, self.room) for state, layer in pairs]
        for layer, state in zip(other.layers, other.state, strict=True):
            for field in fields_of(other.options, layer):
                if field.tier == MEASURE:
                    state[field.name].zero_()
        return other

    def take_back(self, lengths: Sequence[int]) -> None:
        """After a step behind these tokens of each row that did not finish: bring the tiers back to where they were.

        Slots are emptied, and what the step pushed out of the window comes back from the host. Sinks are to be found
        anew, since the step may have named wrong ones.
        """
        self.sinks_known = None
        for slot_index in self.fields("slot_index"):
            slot_index.fill_(-1)
        if isinstance(self.options, LowBitOptions) and not self.has_no_host:
            for site in range(len(self.state)):  # before a first step there are none
                for rows, length in self.runs(lengths):
                    window_from_host(self.views(site, rows), self.options.low_bit_length(length), length)


def no_host_memory(needed: int, allowed: int, tokens: int, batch: int, asked: int | None, ranks: int) -> SpecacheError:
    limit = "half of what is free" if asked is None else "option host_memory"
    if ranks > 1:
        limit += f", shared by the {ranks} ranks of this machine"
    return SpecacheError(
        f"the host tier would need {needed / 2**30:.2f} GiB for {tokens:,} tokens x batch {batch}, and may have "
        f"{allowed / 2**30:.2f} GiB ({limit}). Nothing was lost: the cache holds what it held. Lower the batch or the "
        "context, free memory, or set host_memory (bytes) higher."
    )
