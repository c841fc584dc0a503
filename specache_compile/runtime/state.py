"""The state tensors of each layer, created from the method's fields, and their bytes.

Everything here depends only on options, lengths and shapes, so `explain` and a session compute the same sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from specache_compile.kernels.codes.trellis import is_trellis
from specache_compile.kernels.memory.host_memory import host_empty, host_grown
from specache_compile.kernels.movement import copy_stream
from specache_compile.kernels.movement.tier_ops import store_low_bit
from specache_compile.kernels.state.center import is_found, set_center
from specache_compile.kernels.state.cursor import runs_of
from specache_compile.kernels.state.segments import SEGMENT, put, tokens_of
from specache_compile.kernels.state.sinks import find_sinks
from specache_compile.kernels.state.stored_pairs import stored
from specache_compile.kernels.state.stored_tiers import StoredTiers
from specache_compile.methods import METHODS
from specache_compile.methods.field import Field, LayerShape, LayerState
from specache_compile.methods.low_bit import LowBitOptions
from specache_compile.options import MethodOptions

# The tier of fields whose bytes are not counted.
MEASURE = "measure"
# Tokens to quantise at a time when a 16-bit cache is compressed: a multiple of every group size.
MOVED = 2048


def bucket(length: int) -> int:
    """Tokens to allocate for `length` tokens: a multiple of an eighth of the power of two below, at least a segment,
    256.

    Above 2,048 tokens at most an eighth is unused, and a generation needs few buckets.
    """
    return rounded_up(length, 8)


def room(length: int) -> int:
    """Tokens of the bucket that get host memory, for `length` tokens.

    Its steps are finer than a bucket's, since adding memory moves no tensor and compiles no graph. Above 16,384 tokens
    at most 1/64 is unused.
    """
    return rounded_up(length, 64)


def rounded_up(length: int, parts: int) -> int:
    """Round up to a multiple of a segment and of so many parts of the power of two below."""
    power = 1 << max(length, 1).bit_length() - 1
    step = max(SEGMENT, power // parts)
    return -(-max(length, 1) // step) * step


def fields_of(options: MethodOptions, layer: LayerShape) -> tuple[Field, ...]:
    """The state tensors of a layer in the method of these options."""
    return METHODS[options.method].fields_of(options, layer)


def allocate(
    options: MethodOptions, layer: LayerShape, batch: int, capacity: int, backed: int, old: LayerState | None = None
) -> LayerState:
    """Allocate a layer's state tensors, empty or with the contents of the smaller ones of `old`.

    capacity: tokens, from `bucket`.
    backed: tokens with host memory, from `room`.

    A tensor that need not grow is reused, as is a host tier that grows in place. The host tier is uninitialised after
    the cached tokens.
    """
    state = {}
    for field in fields_of(options, layer):
        shape, dtype = field.shape(options, layer, batch, capacity), field.dtype(options, layer)
        if old is None:
            state[field.name] = empty(field, shape, dtype, layer, backed)
        else:
            state[field.name] = grown(field, old[field.name], shape, layer, backed)
    if old is None:
        adopt(state, layer)
    return state


def moved_over(
    state: LayerState, options: LowBitOptions, layer: LayerShape, lengths: Sequence[int], padding: Tensor | None,
    frequencies: Tensor | None, backed: int,
) -> LayerState:  # fmt: skip
    """Compress a layer's 16-bit state (`in_16_bits`) of rows of these lengths to the state under `options`.

    padding, frequencies: as for `append`.
    backed: as for `allocate`.

    The recent tier is reused, as is a host tier that is not rounded. The low-bit tier is quantised block by block, and
    the slots are empty. A state that is compressed already is returned as it is.
    """
    codes = state["codes"]
    fields = fields_of(options, layer)
    shapes = {field: field.shape(options, layer, len(lengths), codes.shape[2]) for field in fields}
    if all(state[field.name].shape == shape for field, shape in shapes.items()):
        return state
    new = {
        field.name: state[field.name]
        if state[field.name].shape == shape and field.tier != "low-bit"
        else empty(field, shape, field.dtype(options, layer), layer, backed)
        for field, shape in shapes.items()
    }
    if "host" in state and new["host"] is not state["host"]:
        for start in range(0, max(lengths), MOVED):
            pairs = tokens_of(state["host"], start, min(start + MOVED, max(lengths)))
            put(new["host"], start, stored(pairs, new["host"]))
    for rows, length in runs_of(lengths):
        low_bit, there = options.low_bit_length(length), None if padding is None else padding[rows]
        tiers = StoredTiers(*(new[name][rows] for name in StoredTiers._fields))
        if tiers.sink_index.shape[2]:
            find_sinks(tiers.sink_index, None if there is None else there[:, 0, 0], 0, length)
        if low_bit and is_found(tiers.center, frequencies, is_trellis(tiers.key_params)):
            keys = codes[rows, :, :low_bit].unflatten(3, (2, -1))[:, :, :, 0]
            counts = None if there is None else there[..., :low_bit].mT
            turned_by = None if frequencies is None else frequencies.to(keys.device)
            set_center(keys, counts, turned_by, tiers.center, options.group_size)
        for start in range(0, low_bit, MOVED):
            pairs = codes[rows, :, start : min(start + MOVED, low_bit)].unflatten(3, (2, -1))
            store_low_bit(pairs, there, start, tiers, options.layout, options.zero_point)
    adopt(new, layer)
    return new


def empty(field: Field, shape: tuple[int, ...], dtype: torch.dtype, layer: LayerShape, backed: int) -> Tensor:
    """A field's tensor with its empty value; on the host uninitialised, with memory for the first `backed` tokens."""
    if field.on_host:
        return host_empty(shape, dtype, layer.device, backed // SEGMENT)
    return torch.full(shape, field.empty, dtype=dtype, device=layer.device)


def grown(field: Field, old: Tensor, shape: tuple[int, ...], layer: LayerShape, backed: int) -> Tensor:
    """`old` if it has that shape and memory; else a larger tensor that begins with the contents of `old`."""
    if not field.on_host and old.shape == shape:
        return old
    larger = host_grown(old, shape, layer.device, backed // SEGMENT) if field.on_host else None
    if larger is None:
        larger = empty(field, shape, old.dtype, layer, backed)
        held = backed_part(field, old, backed)
        larger.narrow(field.token_dim, 0, held.shape[field.token_dim]).copy_(held)
    return larger


def copied(
    state: LayerState, options: MethodOptions, layer: LayerShape, backed: int, rows: Tensor | None = None
) -> LayerState:
    """A copy of the state tensors, or of their batch rows `rows`."""
    twin = {}
    for field in fields_of(options, layer):
        tensor = state[field.name]
        shape = list(tensor.shape)
        if rows is not None and field.by_row:
            shape[field.row_dim] = rows.numel()
        new = twin[field.name] = empty(field, tuple(shape), tensor.dtype, layer, backed)
        source, target = (backed_part(field, x, backed) for x in (tensor, new))
        if rows is None or not field.by_row:
            target.copy_(source)
        else:
            torch.index_select(source, field.row_dim, rows.to(source.device), out=target)
    adopt(twin, layer)
    return twin


def rows_of(state: LayerState, fields: Iterable[Field], rows: slice) -> LayerState:
    """Views of these batch rows of a layer's state tensors; tensors without rows are whole."""
    return {
        field.name: (state[field.name][:, rows] if field.row_dim else state[field.name][rows])
        if field.by_row
        else state[field.name]
        for field in fields
    }


def backed_part(field: Field, tensor: Tensor, backed: int) -> Tensor:
    """The part of a field's tensor that has memory: in the host tier the first `backed` tokens."""
    return tensor[: backed // SEGMENT] if field.on_host else tensor


def adopt(state: LayerState, layer: LayerShape) -> None:
    """On CUDA, register the copy stream's use of a layer's slots; not for fake tensors."""
    if layer.device.type == "cuda" and "slots" in state and not isinstance(state["slots"], FakeTensor):
        copy_stream.adopt(state)


def host_bytes(options: MethodOptions, layers: Sequence[LayerShape], batch: int, backed: int) -> int:
    """Bytes of a host tier with memory for so many tokens."""
    return sum(
        field.nbytes(options, layer, batch, backed)
        for layer in layers
        for field in fields_of(options, layer)
        if field.on_host
    )


def tier_totals(sizes: Iterable[tuple[Field, int]]) -> dict[str, int]:
    """Bytes of each tier, from those of its fields. The host tier is always included."""
    total = {"host": 0}
    for field, size in sizes:
        if field.tier != MEASURE:
            total[field.tier] = total.get(field.tier, 0) + size
    return total


def device_total(tiers: Mapping[str, int]) -> int:
    """KV bytes on the device: all tiers except the host tier."""
    return sum(size for tier, size in tiers.items() if tier != "host")


def bytes_by_tier(
    options: MethodOptions, layers: Sequence[LayerShape], state: Sequence[LayerState], backed: int
) -> dict[str, int]:
    """Bytes of each tier, summed over layers, from the tensors; of the host tier, those with memory."""
    return tier_totals(
        (field, backed_part(field, tensors[field.name], backed).nbytes)
        for layer, tensors in zip(layers, state, strict=True)
        for field in fields_of(options, layer)
    )


def predicted_bytes(options: MethodOptions, layers: Sequence[LayerShape], batch: int, length: int) -> dict[str, int]:
    """Bytes of each tier for `length` tokens, without allocating anything."""
    options = options.for_prompt(length)
    return tier_totals(
        (field, field.nbytes(options, layer, batch, (room if field.on_host else bucket)(length)))
        for layer in layers
        for field in fields_of(options, layer)
    )


def full_cache_bytes(layers: Sequence[LayerShape], batch: int, length: int) -> int:
    """Bytes of the same tokens in Hugging Face's cache, in the model's dtype."""
    return sum(2 * batch * layer.heads * length * layer.head_dim * layer.dtype.itemsize for layer in layers)


def bytes_in_16_bits(layers: Sequence[LayerShape], batch: int, length: int) -> int:
    """Bytes of the same tokens in a 16-bit cache, the baseline of `kv_ratio` for every dtype of a model."""
    return sum(2 * batch * layer.heads * length * layer.head_dim * 2 for layer in layers)
