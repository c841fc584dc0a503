"""Where the KV pairs live: the state tensors of each layer, their shapes, and their bytes.

Everything here is a function of the options, the number of tokens and the layer's shape, so that what `explain`
predicts and what a session allocates are the same sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specache_compile.kernels import copy_stream
from specache_compile.kernels.host_memory import host_zeros
from specache_compile.kernels.quantize import packed_width, value_group
from specache_compile.kernels.tiers import store_low_bit

from .options import Options

# Which tier each state tensor belongs to, in the order in which graphs take them.
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
}
FIELDS = tuple(TIER_OF)
# State whose second dimension after the heads is tokens (or groups of them), and grows with the context.
GROWING = ("host", "codes", "key_params", "value_params")
DEVICE_TIERS = ("low-bit", "recent", "slots")
SMALLEST_BUCKET = 256
# Tokens quantised at a time where a 16-bit cache moves over: a multiple of every group size.
MOVED = 2048

LayerState = dict[str, Tensor]


@dataclass(frozen=True)
class LayerShape:
    """The KV heads of one site: count, channels, dtype and device."""

    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


def bucket(length: int) -> int:
    """Tokens to allocate for `length` tokens: steps of an eighth of the power of two below, at least 256.

    At most an eighth is spare beyond 2,048 tokens, and a generation meets a handful of buckets.
    """
    power = 1 << max(length, 1).bit_length() - 1
    step = max(SMALLEST_BUCKET, power // 8)
    return -(-max(length, 1) // step) * step


def state_shapes(
    options: Options, layer: LayerShape, batch: int, capacity: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each state tensor for a `capacity` from `bucket`; scales are in the model's dtype."""
    rows = (batch, layer.heads)
    d, dtype = layer.head_dim, layer.dtype
    quantized = options.bits < 16
    width = packed_width(d, options.bits) if quantized else d
    groups = capacity // options.group_size if quantized else 0
    tokens = capacity if quantized else 0
    return {
        "host": ((*rows, capacity, 2, d), dtype),
        "codes": ((*rows, capacity, 2, width), torch.uint8 if quantized else dtype),
        "key_params": ((*rows, groups, 2, d), dtype),
        "value_params": ((*rows, tokens, 2, d // value_group(d, options.group_size)), dtype),
        "recent": ((*rows, options.window, 2, d), dtype),
        "slots": ((*rows, options.top_k, 2, d), dtype),
        "slot_index": ((*rows, options.top_k), torch.int32),
        "wanted": ((*rows, options.top_k), torch.int32),
        "fetched": ((1,), torch.int64),
        "tally": ((3,), torch.float64),
    }


def device_of(field: str, layer: LayerShape) -> torch.device:
    """The host tier lives on the CPU, the rest beside the model; on the meta device nothing lives anywhere."""
    return torch.device("cpu") if field == "host" and layer.device.type != "meta" else layer.device


def allocate(
    options: Options, layer: LayerShape, batch: int, capacity: int, old: LayerState | None = None
) -> LayerState:
    """A layer's state tensors: zeros, no slot filled; or what `old`, of a smaller capacity, holds.

    The host tier is pinned where there is a GPU to read it; what does not grow is `old`'s own.
    """
    state = {}
    for field, (shape, dtype) in state_shapes(options, layer, batch, capacity).items():
        if old is not None and field not in GROWING:
            state[field] = old[field]
            continue
        state[field] = zeros(field, shape, dtype, layer)
        if old is not None:
            state[field][:, :, : old[field].shape[2]] = old[field]
    if old is None:
        state["slot_index"].fill_(-1)
        state["wanted"].fill_(-1)
        adopt(state, layer)
    return state


def moved_over(state: LayerState, options: Options, layer: LayerShape, batch: int, length: int) -> LayerState:
    """A layer's 16-bit state (`Options.in_16_bits`) with `length` tokens, as `options` have it.

    Host and recent tier stay; the low-bit tier is quantised from the 16-bit one, a block at a time; slots are empty.
    """
    codes = state["codes"]
    kept = ("host", "recent", "fetched", "tally")
    new = {
        field: state[field] if field in kept else zeros(field, shape, dtype, layer)
        for field, (shape, dtype) in state_shapes(options, layer, batch, codes.shape[2]).items()
    }
    low_bit = options.low_bit_length(length)
    for start in range(0, low_bit, MOVED):
        pairs = codes[:, :, start : min(start + MOVED, low_bit)]
        store_low_bit(pairs, start, new["codes"], new["key_params"], new["value_params"], options.zero_point)
    new["slot_index"].fill_(-1)
    new["wanted"].fill_(-1)
    adopt(new, layer)
    return new


def zeros(field: str, shape: tuple[int, ...], dtype: torch.dtype, layer: LayerShape) -> Tensor:
    """Zeros where a field lives."""
    if field == "host":
        return host_zeros(shape, dtype, pinned=layer.device.type == "cuda")
    return torch.zeros(shape, dtype=dtype, device=layer.device)


def copied(state: LayerState, layer: LayerShape, rows: Tensor | None = None) -> LayerState:
    """A second set of state tensors with the same content, or with the batch rows `rows` of it."""
    twin = {}
    for field, tensor in state.items():
        whole = rows is None or TIER_OF[field] == "measure"
        batch = tensor.shape[0] if whole or rows is None else rows.numel()
        twin[field] = zeros(field, (batch, *tensor.shape[1:]), tensor.dtype, layer)
        if whole or rows is None:
            twin[field].copy_(tensor)
        else:
            torch.index_select(tensor, 0, rows.to(tensor.device), out=twin[field])
    adopt(twin, layer)
    return twin


def adopt(state: LayerState, layer: LayerShape) -> None:
    """On CUDA, make the copy stream's use of a layer's slots known."""
    if layer.device.type == "cuda":
        copy_stream.adopt(state)


def host_bytes(layers: list[LayerShape], batch: int, capacity: int) -> int:
    """Bytes of the host tier."""
    return full_cache_bytes(layers, batch, capacity)


def bytes_by_tier(state: list[LayerState]) -> dict[str, int]:
    """Bytes of each tier, summed over layers, from the tensors themselves."""
    total = {"host": 0, "low-bit": 0, "recent": 0, "slots": 0}
    for layer in state:
        for field, tensor in layer.items():
            if TIER_OF[field] in total:
                total[TIER_OF[field]] += tensor.nbytes
    return total


def predicted_bytes(options: Options, layers: list[LayerShape], batch: int, length: int) -> dict[str, int]:
    """Bytes of each tier for `length` tokens, without allocating anything."""
    total = {"host": 0, "low-bit": 0, "recent": 0, "slots": 0}
    for layer in layers:
        for field, (shape, dtype) in state_shapes(options, layer, batch, bucket(length)).items():
            if TIER_OF[field] in total:
                total[TIER_OF[field]] += torch.Size(shape).numel() * dtype.itemsize
    return total


def full_cache_bytes(layers: list[LayerShape], batch: int, length: int) -> int:
    """Bytes of the same tokens in HF's own cache, in the model's dtype."""
    return sum(2 * batch * layer.heads * length * layer.head_dim * layer.dtype.itemsize for layer in layers)


def paper_kv_ratio(bits: int, group_size: int, length: int, window: int = 128) -> float:
    """Device KV size against 16 bits as the paper counts it: (B + 32/g)/16 + (R + k)/L (Table 1, KV Cache Size)."""
    return (bits + 32 / group_size) / 16 + window / length
