"""Where the KV pairs live: the state tensors of each layer, their shapes, and their bytes.

Everything here is a function of the options, the number of tokens and the layer's shape, so that what `explain`
predicts and what a session allocates are the same sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from specache_compile.kernels import copy_stream
from specache_compile.kernels.host_memory import host_empty
from specache_compile.kernels.tiers import store_low_bit

from .methods import METHODS
from .methods.method import Shapes
from .options import Options

# Which tier each state tensor belongs to.
TIER_OF = {
    "host": "host",
    "codes": "low-bit",
    "key_params": "low-bit",
    "value_params": "low-bit",
    "recent": "recent",
    "slots": "slots",
    "slot_index": "slots",
    "wanted": "slots",
    "fetched": "measure",
    "tally": "measure",
    "full_cache": "cache",
    "device_keys": "keys",
    "kept": "kept",
    "kept_token": "kept",
    "history": "kept",
}
FIELDS = tuple(TIER_OF)
# What an empty place of them holds.
EMPTY_IS_MINUS_1 = ("slot_index", "wanted", "kept_token")
SMALLEST_BUCKET = 256
# Tokens quantised at a time where a 16-bit cache moves over: a multiple of every group size.
MOVED = 2048

LayerState = dict[str, Tensor]


@dataclass(frozen=True)
class LayerShape:
    """The KV heads of one site: count, channels, dtype, device, and the site's number."""

    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    number: int = 0


def bucket(length: int) -> int:
    """Tokens to allocate for `length` tokens: steps of an eighth of the power of two below, at least 256.

    At most an eighth is spare beyond 2,048 tokens, and a generation meets a handful of buckets.
    """
    power = 1 << max(length, 1).bit_length() - 1
    step = max(SMALLEST_BUCKET, power // 8)
    return -(-max(length, 1) // step) * step


def state_shapes(options: Options, layer: LayerShape, batch: int, capacity: int) -> Shapes:
    """Shape and dtype of each state tensor for a `capacity` from `bucket`, as the method has it."""
    return METHODS[options.method].shapes(options, layer, batch, capacity)


def device_of(field: str, layer: LayerShape) -> torch.device:
    """The host tier lives on the CPU, the rest beside the model; on the meta device nothing lives anywhere."""
    return torch.device("cpu") if field == "host" and layer.device.type != "meta" else layer.device


def allocate(
    options: Options, layer: LayerShape, batch: int, capacity: int, old: LayerState | None = None
) -> LayerState:
    """A layer's state tensors: zeros, no slot filled; or what `old`, of a smaller capacity, holds.

    The host tier is pinned where there is a GPU to read it, and holds anything beyond the cached tokens; what does not
    grow is `old`'s own.
    """
    state = {}
    for field, (shape, dtype) in state_shapes(options, layer, batch, capacity).items():
        if old is not None and old[field].shape == shape:
            state[field] = old[field]
            continue
        state[field] = empty(field, shape, dtype, layer)
        if old is not None:
            state[field][:, :, : old[field].shape[2]] = old[field]
    if old is None:
        adopt(state, layer)
    return state


def moved_over(
    state: LayerState, options: Options, layer: LayerShape, batch: int, length: int, padding: Tensor | None
) -> LayerState:
    """A layer's 16-bit state (`Options.in_16_bits`) with `length` tokens, as `options` have it.

    padding: as for `append`. Host and recent tier stay; the low-bit tier is quantised from the 16-bit one, a block at a
    time; slots are empty. A state that has moved already stays.
    """
    codes = state["codes"]
    shapes = state_shapes(options, layer, batch, codes.shape[2])
    if all(state[field].shape == shape for field, (shape, _) in shapes.items()):
        return state
    kept = ("host", "recent", "fetched", "tally")
    new = {
        field: state[field] if field in kept else empty(field, shape, dtype, layer)
        for field, (shape, dtype) in shapes.items()
    }
    low_bit = options.low_bit_length(length)
    for start in range(0, low_bit, MOVED):
        pairs = codes[:, :, start : min(start + MOVED, low_bit)]
        store_low_bit(pairs, padding, start, new["codes"], new["key_params"], new["value_params"], options.zero_point)
    adopt(new, layer)
    return new


def empty(field: str, shape: tuple[int, ...], dtype: torch.dtype, layer: LayerShape) -> Tensor:
    """An empty tensor where a field lives: zeros, or -1; on the host, anything."""
    if field == "host":
        return host_empty(shape, dtype, layer.device)
    if field in EMPTY_IS_MINUS_1:
        return torch.full(shape, -1, dtype=dtype, device=layer.device)
    return torch.zeros(shape, dtype=dtype, device=layer.device)


def copied(state: LayerState, layer: LayerShape, rows: Tensor | None = None) -> LayerState:
    """A second set of state tensors with the same content, or with the batch rows `rows` of it."""
    twin = {}
    for field, tensor in state.items():
        whole = rows is None or TIER_OF[field] == "measure"
        batch = tensor.shape[0] if whole or rows is None else rows.numel()
        twin[field] = empty(field, (batch, *tensor.shape[1:]), tensor.dtype, layer)
        if whole or rows is None:
            twin[field].copy_(tensor)
        else:
            torch.index_select(tensor, 0, rows.to(tensor.device), out=twin[field])
    adopt(twin, layer)
    return twin


def adopt(state: LayerState, layer: LayerShape) -> None:
    """On CUDA, make the copy stream's use of a layer's slots known."""
    if layer.device.type == "cuda" and "slots" in state:
        copy_stream.adopt(state)


def host_bytes(options: Options, layers: list[LayerShape], batch: int, capacity: int) -> int:
    """Bytes of the host tier."""
    shapes = [state_shapes(options, layer, batch, capacity).get("host") for layer in layers]
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in filter(None, shapes))


def tier_totals(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Bytes of each tier from those of its fields; the host's is always there."""
    total = {"host": 0}
    for field, size in sizes:
        if TIER_OF[field] != "measure":
            total[TIER_OF[field]] = total.get(TIER_OF[field], 0) + size
    return total


def bytes_by_tier(state: list[LayerState]) -> dict[str, int]:
    """Bytes of each tier, summed over layers, from the tensors themselves."""
    return tier_totals((field, tensor.nbytes) for layer in state for field, tensor in layer.items())


def predicted_bytes(options: Options, layers: list[LayerShape], batch: int, length: int) -> dict[str, int]:
    """Bytes of each tier for `length` tokens, without allocating anything."""
    options = options.for_prompt(length)
    return tier_totals(
        (field, torch.Size(shape).numel() * dtype.itemsize)
        for layer in layers
        for field, (shape, dtype) in state_shapes(options, layer, batch, bucket(length)).items()
    )


def full_cache_bytes(layers: list[LayerShape], batch: int, length: int) -> int:
    """Bytes of the same tokens in HF's own cache, in the model's dtype."""
    return sum(2 * batch * layer.heads * length * layer.head_dim * layer.dtype.itemsize for layer in layers)


def paper_kv_ratio(bits: int, group_size: int, length: int, window: int = 128) -> float:
    """Device KV size against 16 bits as the paper counts it: (B + 32/g)/16 + (R + k)/L (Table 1, KV Cache Size)."""
    return (bits + 32 / group_size) / 16 + window / length
