"""The cost of each op: FLOPs, bytes of device memory and bytes over PCIe, computed from shapes.

A cost is a function (the call's arguments by name, the `load`, the site's number) → `Cost`. For cache tensors it
counts the cached tokens of the load instead of the allocated size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import SymInt, Tensor

from .attention.kept_logits import LOGIT_BLOCK, bytes_of_logit, kept_dtype
from .codes.records import stored_dim
from .state.center import tokens_of_one
from .state.stored_pairs import rounded_width, rounds


@dataclass(frozen=True)
class Cost:
    """The cost of a launch.

    flops: floating-point operations.
    hbm: bytes read and written on the device.
    to_device, to_host: bytes over PCIe.
    """

    flops: float = 0.0
    hbm: float = 0.0
    to_device: float = 0.0
    to_host: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


# Number of lanes → share of the selected pairs that a correction fetches. With one lane the slots hold the last
# token's selection, with two the pairs fetched for the speculative token. Measured with SmolLM2 at 4,096 tokens, greedy
# (`specache generate --stats`): 28 and 22 of 64 pairs.
CORRECTED = {1: 0.44, 2: 0.34}


# Share of the tokens whose logits a selection by kept logits reads: for normal logits of standard deviation 2
# (`triton_select_logits.py`).
CANDIDATES = 0.1


@dataclass(frozen=True)
class Workload:
    """The workload of a step.

    options: options of the method.
    layers, query_heads: `LayerShape` and number of query heads of each site.
    length: tokens cached before the step.
    reuse: share of the selected pairs that are in the slots already.
    corrected: share of the selected pairs that a correction fetches.
    """

    options: Any
    layers: tuple[Any, ...]
    query_heads: tuple[int, ...]
    batch: int
    length: int
    reuse: float = 0.0
    corrected: float = 0.0

    def at(self, length: int) -> Workload:
        return replace(self, length=length)


Arguments = Mapping[str, Any]
CostOf = Callable[[Arguments, Workload, int], Cost]


def size_of(size: int | SymInt) -> int:
    """Return a size; for a symbol its value during tracing, without a guard."""
    return size if isinstance(size, int) else int(size.node.hint)


def elements(value: Any) -> int:
    count = 1
    for size in value.shape:
        count *= size_of(size)
    return count


def bytes_of(value: Any) -> int:
    return elements(value) * value.dtype.itemsize if isinstance(value, Tensor) else 0


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

    @property
    def low(self) -> float:
        return self.low_keys + self.low_values


def pair_bytes(options: Any, layer: Any) -> Pair:
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


def fetched_pairs(options: Any, length: int) -> int:
    """Return the number of pairs that one head selects for its slots at `length` cached tokens: at most k."""
    return min(options.top_k, options.low_bit_length(length))


def exact_pairs(options: Any, length: int) -> int:
    """Return the number of 16-bit pairs of one head on the device: window, slots and sinks."""
    low = options.low_bit_length(length)
    return length - low + fetched_pairs(options, length) + min(options.sinks, low)


def rows(load: Workload, site: int) -> int:
    return load.batch * load.layers[site].heads


def nothing(arguments: Arguments, load: Workload, site: int) -> Cost:
    return Cost()


def decode_attention(arguments: Arguments, load: Workload, site: int) -> Cost:
    pair, q, k = pair_bytes(load.options, load.layers[site]), arguments["q"], arguments["k"]
    low = load.options.low_bit_length(load.length)
    read = low * pair.low + exact_pairs(load.options, load.length) * pair.exact
    scores = 4 * rows(load, site) * low if load.options.top_k else 0
    seen = load.length + size_of(q.shape[2])
    attended = Cost(4 * elements(q) * seen, rows(load, site) * read + 2 * bytes_of(q) + 2 * bytes_of(k) + scores)
    return attended + share_of_center(arguments, load, site)


def share_of_center(arguments: Arguments, load: Workload, site: int) -> Cost:
    """Cost that centered keys add to a decode step: one number per query row and low-bit token (or group), written and
    read."""
    q, rows_of_center = arguments["q"], load.options.center_rows(load.layers[site])
    if not rows_of_center:
        return Cost()
    shares = load.options.low_bit_length(load.length) // tokens_of_one(rows_of_center, load.options.group_size)
    query_rows = elements(q) // size_of(q.shape[3])
    return Cost(4 * elements(q) * shares, 8 * query_rows * shares)


def score_low_bit(arguments: Arguments, load: Workload, site: int) -> Cost:
    """Cost of reading the keys of low-bit tier, window and sinks once. It writes each query row's logits. For scores it
    reads them again, and writes a score per head and lane."""
    pair, q = pair_bytes(load.options, load.layers[site]), arguments["q"]
    low = load.options.low_bit_length(load.length)
    exact = load.length - low + min(load.options.sinks, low)
    keys = rows(load, site) * (low * pair.low_keys + exact * pair.exact / 2)
    lanes, scored = size_of(q.shape[2]), bool(arguments.get("scores", True))
    logits = (1 + scored) * bytes_of_logit(q.dtype) * low * lanes * load.batch * load.query_heads[site]
    scores = 4 * low * lanes * rows(load, site) if scored else 0
    attended = Cost(2 * elements(q) * load.length, keys + bytes_of(q) + logits + scores)
    return attended + share_of_center(arguments, load, site)


def attend_scored(arguments: Arguments, load: Workload, site: int) -> Cost:
    """Cost of reading the logits, the low-bit tier's values and the exact pairs once."""
    pair, q = pair_bytes(load.options, load.layers[site]), arguments["q"]
    low = load.options.low_bit_length(load.length)
    exact = exact_pairs(load.options, load.length)
    read = rows(load, site) * (low * pair.low_values + exact * pair.exact)
    logits = bytes_of_logit(q.dtype) * low * size_of(q.shape[2]) * load.batch * load.query_heads[site]
    return Cost(2 * elements(q) * (load.length + 2 * exact), read + logits + 2 * bytes_of(q))


def correct(arguments: Arguments, load: Workload, site: int) -> Cost:
    """Cost of fetching the pairs that lane 0 selects and that the slots lack. The selection reads the logits' bases and
    the logits of the candidates."""
    each = 4 / LOGIT_BLOCK + CANDIDATES * kept_dtype(arguments["q"].dtype).itemsize
    read = each * load.options.low_bit_length(load.length) * load.batch * load.query_heads[site]
    return brought(load, site, load.corrected) + Cost(hbm=read)


def brought(load: Workload, site: int, share: float) -> Cost:
    """Cost of copying this share of the selected pairs from the host into the slots."""
    pairs = rows(load, site) * fetched_pairs(load.options, load.length) * share
    pair = pair_bytes(load.options, load.layers[site])
    return Cost(hbm=pairs * pair.exact, to_device=pairs * pair.on_host)


def extend_attention(arguments: Arguments, load: Workload, site: int) -> Cost:
    """Cost of reading every cached pair in its stored dtype."""
    q, cache = arguments["q"], arguments["host"]
    width = size_of(cache.shape[-1]) * cache.dtype.itemsize
    past = rows(load, site) * load.length * 2 * width
    seen = load.length + size_of(q.shape[2]) / 2
    return Cost(4 * elements(q) * seen, past + 2 * bytes_of(q), to_device=past if arguments["on_host"] else 0)


def append(arguments: Arguments, load: Workload, site: int) -> Cost:
    """Cost per token: a group of g tokens is quantised once in g steps."""
    pair, tokens = pair_bytes(load.options, load.layers[site]), size_of(arguments["k"].shape[2])
    return Cost(hbm=rows(load, site) * tokens * (3 * pair.exact + pair.low))


def offload(arguments: Arguments, load: Workload, site: int) -> Cost:
    tokens = size_of(arguments["k"].shape[2])
    pair = pair_bytes(load.options, load.layers[site])
    read = rows(load, site) * tokens * pair.exact
    moved = rows(load, site) * tokens * pair.on_host
    return Cost(hbm=read, to_host=moved) if arguments["on_host"] else Cost(hbm=read + moved)


def select_topk(arguments: Arguments, load: Workload, site: int) -> Cost:
    return Cost(hbm=4 * rows(load, site) * (load.options.low_bit_length(load.length) + load.options.top_k))


def prefetch(arguments: Arguments, load: Workload, site: int) -> Cost:
    return brought(load, site, 1 - load.reuse)
