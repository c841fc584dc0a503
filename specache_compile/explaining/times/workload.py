"""What a decode step works on: options, layers, lengths, and the bytes of a KV pair in each tier."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specache_compile.kernels.codes.records import stored_dim
from specache_compile.kernels.state.stored_pairs import rounded_width, rounds
from specache_compile.methods.field import LayerShape
from specache_compile.passes.reading.nodes import hint

# Number of lanes → share of the selected pairs that a correction fetches. With one lane the slots hold the last
# token's selection, with two the pairs fetched for the speculative token. Measured with SmolLM2 at 4,096 tokens, greedy
# (`specache generate --stats`): 28 and 22 of 64 pairs.
CORRECTED = {1: 0.44, 2: 0.34}


@dataclass(frozen=True)
class Workload:
    """The workload of a step.

    options: options of the method.
    layers, query_heads: shape and number of query heads of each site.
    length: tokens cached before the step.
    reuse: share of the selected pairs that are in the slots already.
    corrected: share of the selected pairs that a correction fetches.
    """

    options: Any
    layers: tuple[LayerShape, ...]
    query_heads: tuple[int, ...]
    batch: int
    length: int
    reuse: float = 0.0
    corrected: float = 0.0


@dataclass(frozen=True)
class Pair:
    """Bytes of one KV pair of one head.

    exact: in 16 bits, or in the model's dtype.
    on_host: in the host tier.
    low_keys, low_values: of the key and of the value in the low-bit tier.
    """

    exact: int
    on_host: int
    low_keys: float
    low_values: float


def pair_bytes(options: Any, layer: LayerShape) -> Pair:
    exact = 2 * layer.head_dim * layer.dtype.itemsize
    on_host = 2 * rounded_width(layer.head_dim) if rounds(options.bits_on_host, layer.dtype) else exact
    layout = getattr(options, "layout", None)
    if layout is None or not layout.is_quantised:
        return Pair(exact, on_host, exact / 2, exact / 2)
    d, item = stored_dim(layer.head_dim), options.param_dtype(layer.dtype).itemsize
    scales = 1 if options.has_key_trellis else 2 * d / options.group_size
    keys = d * layout.key_bits / 8 + item * scales
    numbers = 1 if options.has_trellis else 2 * d / min(d, options.group_size)
    return Pair(exact, on_host, keys, d * layout.value_bits / 8 + item * numbers)


def elements(value: Any) -> int:
    return math.prod(map(hint, value.shape))


def bytes_of(value: Any) -> int:
    return elements(value) * value.dtype.itemsize if isinstance(value, Tensor) else 0
