"""The state tensors of each layer, created from the method's fields, and their bytes.

Everything here depends only on options, lengths and shapes, so `explain` and a session compute the same sums.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from specache_compile.kernels.memory.host_memory import host_empty
from specache_compile.kernels.movement import copy_stream
from specache_compile.kernels.state.page_table import PAGE
from specache_compile.methods import METHODS
from specache_compile.methods.field import MEASURE, Field, LayerShape, LayerState
from specache_compile.methods.method import Method
from specache_compile.options import MethodOptions


def bucket(length: int) -> int:
    """Tokens to allocate for `length` tokens: a multiple of an eighth of the power of two below, at least a page,
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


def pages_of_rows(rows: int, tokens: int) -> tuple[int, int]:
    """Pages of a pool for rows of so many tokens each, and those that have host memory."""
    return rows * bucket(tokens) // PAGE, rows * room(tokens) // PAGE


def rounded_up(length: int, parts: int) -> int:
    """Round up to a multiple of a page and of so many parts of the power of two below."""
    power = 1 << max(length, 1).bit_length() - 1
    step = max(PAGE, power // parts)
    return -(-max(length, 1) // step) * step


def fields_of(options: MethodOptions, layer: LayerShape) -> tuple[Field, ...]:
    """The state tensors of a layer in the method of these options."""
    return fields_in(METHODS[options.method], options, layer)


@functools.lru_cache(4096)
def fields_in(method: Method, options: MethodOptions, layer: LayerShape) -> tuple[Field, ...]:
    return method.fields_of(options, layer)


def paged_fields(options: MethodOptions, layer: LayerShape) -> list[Field]:
    """Fields whose tokens are in pages."""
    return [field for field in fields_of(options, layer) if field.by_page]


def row_fields(options: MethodOptions, layer: LayerShape) -> list[Field]:
    """Fields with one slice per row, outside of the pages."""
    return [field for field in fields_of(options, layer) if field.by_row and not field.by_page]


def empty(
    field: Field, options: MethodOptions, layer: LayerShape, rows: int, capacity: int, backed: int | None = None
) -> Tensor:
    """A field of so many rows, or of so many pages of 256 tokens, with its empty value.

    On the host it is uninitialised, with memory for the first `backed` pages, or for all.
    """
    shape, dtype = field.shape(options, layer, rows, capacity), field.dtype(options, layer)
    if field.on_host:
        return host_empty(shape, dtype, layer.device, backed)
    return torch.full(shape, field.empty, dtype=dtype, device=layer.device)


def row_state(options: MethodOptions, layer: LayerShape, rows: int, capacity: int) -> LayerState:
    """Empty buffers for so many rows, and the counts over all rows."""
    fields = [field for field in fields_of(options, layer) if not field.by_page]
    made = {field.name: empty(field, options, layer, rows, capacity) for field in fields}
    if layer.device.type == "cuda" and "slots" in made and not isinstance(made["slots"], FakeTensor):
        copy_stream.adopt(made)  # registers the copy stream's use of the slots
    return made


def tier_bytes(
    options: MethodOptions, layers: Sequence[LayerShape], pages: int, places: int, rows: int, capacity: int
) -> dict[str, int]:
    """Bytes of each tier: of so many pages, of which `places` have host memory, and of the buffers of so many rows. The
    host tier is always included."""
    total = {"host": 0}
    for layer in layers:
        for field in fields_of(options, layer):
            if field.tier != MEASURE:
                sizes = (places if field.on_host else pages, PAGE) if field.by_page else (rows, capacity)
                total[field.tier] = total.get(field.tier, 0) + field.nbytes(options, layer, *sizes)
    return total


def device_total(tiers: Mapping[str, int]) -> int:
    """KV bytes on the device: all tiers except the host tier."""
    return sum(size for tier, size in tiers.items() if tier != "host")


def predicted_bytes(options: MethodOptions, layers: Sequence[LayerShape], batch: int, length: int) -> dict[str, int]:
    """Bytes of each tier for `length` tokens, without allocating anything."""
    return tier_bytes(options.for_prompt(length), layers, *pages_of_rows(batch, length), batch, bucket(length))


def page_bytes(options: MethodOptions, layers: Sequence[LayerShape]) -> dict[str, int]:
    """Bytes of a page, by tier."""
    return tier_bytes(options, layers, 1, 1, 0, 0)


def full_cache_bytes(layers: Sequence[LayerShape], batch: int, length: int, itemsize: int = 0) -> int:
    """Bytes of the same tokens in Hugging Face's cache.

    itemsize: 2 for a 16-bit cache, the baseline of `kv_ratio` for every dtype of a model; 0: that of the model's dtype.
    """
    return sum(
        2 * batch * layer.heads * length * layer.head_dim * (itemsize or layer.dtype.itemsize) for layer in layers
    )
