"""The launches that a tier op makes on a CUDA device, and the work of each.

They follow the triton_*.py of kernels/ and kernels/movement/copy_stream.py, whose docstrings list their launches. Bytes
and FLOPs are those of kernels/costs.py, divided among the launches; `step_time.py` computes times from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from specache_compile.kernels import costs
from specache_compile.kernels.attention.kept_logits import bytes_of_logit
from specache_compile.kernels.codes.params import EIGHT_BITS
from specache_compile.kernels.codes.records import ROWS_FROM, stored_dim
from specache_compile.kernels.costs import Cost, Workload, size_of
from specache_compile.runtime.state import bucket

from .devices import Device

STREAMS = MAIN, CORRECTION, COPY = "main", "correction", "copy"

# Seconds, all estimates: between a launch's end and the next one's beginning in a CUDA graph; of the smallest kernel;
# by which a large kernel's last programs exceed their even share.
GAP, SMALLEST, TAIL = 1.3e-6, 1.3e-6, 1.5e-6
# Seconds of a gather: a program finds one head's missing pairs; a read over the link is answered.
FIND, ROUND_TRIP = 4.2e-6, 2.0e-6
# `triton_select`: elements of a tile and of a warp, and its most warps. `triton_copy`: programs of a gather beside
# compute. Written again here, because those modules need Triton and explaining does not.
TILE, OF_A_WARP, MOST_WARPS, PROGRAMS = 4096, 512, 8, 16
# Instructions that a scheduler issues in a cycle, and schedulers of a multiprocessor. The first is 0.52 to 0.55 by the
# measured time of attention over low bits on an H200 (benchmarks/results/gpu_kernels.json) and its instructions.
ISSUED, SCHEDULERS = 0.52, 4
# A warp's instructions for a stored number of the low-bit tier, for at most eight query rows and d 128, by the code of
# keys and of values: bits of levels, or the trellis. tools/compile_kernels.py counts them, here for sm_90.
INSTRUCTIONS: Mapping[str, Mapping[int | str, float]] = {
    "keys": {1: 1.38, 2: 1.42, 4: 1.91, 8: 10.0, "trellis": 1.66},
    "values": {1: 2.19, 2: 2.19, 4: 2.22, 8: 13.0, "trellis": 1.32},
}
# Further ones for keys of 1 to 4 bits whose scales have the model's dtype.
OF_LARGE_PARAMS = 0.24
# Those of other head_dims relative to d 128: what a token costs is shared by fewer or more numbers.
BY_DIM: Mapping[str, Mapping[int, float]] = {
    "keys": {64: 1.37, 128: 1.0, 256: 0.83},
    "values": {64: 1.36, 128: 1.0, 256: 0.82},
}
# For a stored number of keys, the share of its group's zero point: an estimate.
OF_ZEROS = 0.07
# For a number of the FP8 cache, in `triton_plain.attend_rows` (sm_90).
OF_E4M3 = 3.1
# A warp's instructions (sm_90): of a program of `keep_best`, some 12 turns of 80 (for sums of softmaxes of normal
# logits) and 1,330 once; for a score of a token, KV head and lane; for a merged query head and lane.
SELECTING, SCORING, MERGING = 12 * 80 + 1_330, 2.5, 1_800
# The same for a selection by kept logits, once for a KV head and for each of its low-bit tokens: estimates for eight
# warps of 2,800 instructions, whose loops depend on the logits.
SELECTING_KEPT, SELECTING_TOKEN = 30_000, 0.7
# Query rows of a tensor core instruction.
WARP, ROWS = 32, 8


@dataclass(frozen=True)
class Kernel:
    """One launch.

    memory, to_device, to_host: bytes.
    flops: of products.
    instructions: a warp's.
    floor: least seconds of its work.
    tail, gap: seconds behind and before it that no resource shortens.
    waits: names of launches on other streams that end before it starts. On its own stream each follows the one before.
    """

    name: str
    op: str = ""
    layer: str = ""
    stream: str = MAIN
    memory: float = 0.0
    flops: float = 0.0
    instructions: float = 0.0
    to_device: float = 0.0
    to_host: float = 0.0
    floor: float = 0.0
    tail: float = 0.0
    gap: float = GAP
    waits: tuple[str, ...] = ()


@dataclass(frozen=True)
class LaunchedOp:
    """A tier op's call.

    arguments: by name, as traced.
    load: the workload to compute.
    site: the number of the attention.
    """

    arguments: Mapping[str, Any]
    load: Workload
    site: int
    device: Device

    @property
    def heads(self) -> int:
        """KV heads of all rows."""
        return self.load.batch * self.load.layers[self.site].heads

    @property
    def lanes(self) -> int:
        return size_of(self.arguments["q"].shape[2])

    @property
    def center_rows(self) -> int:
        return self.load.options.center_rows(self.load.layers[self.site])

    @property
    def low(self) -> int:
        return self.load.options.low_bit_length(self.load.length)

    @property
    def numbers(self) -> float:
        """Stored numbers of the low-bit tier's keys, or of its values."""
        return self.heads * self.low * stored_dim(self.load.layers[self.site].head_dim)

    def cost(self, of: costs.CostOf) -> Cost:
        """The cost for the rows of `load`; it is proportional to their number."""
        given = self.arguments.get("q", self.arguments.get("k"))
        traced = self.load.batch if given is None else size_of(given.shape[0])
        cost = of(self.arguments, replace(self.load, batch=traced), self.site)
        return Cost(*(value * self.load.batch / traced for value in vars(cost).values()))


def small(name: str) -> Kernel:
    """A kernel of few programs."""
    return Kernel(name, floor=SMALLEST)


def instructions(call: LaunchedOp, part: str) -> float:
    """A warp's instructions of the keys' or the values' half; 0 where nothing is quantised (only products)."""
    layout = getattr(call.load.options, "layout", None)
    if layout is None or not layout.is_quantised:
        return 0.0
    options, dim = call.load.options, stored_dim(call.load.layers[call.site].head_dim)
    in_trellis, bits = (
        (options.has_key_trellis, layout.key_bits) if part == "keys" else (options.has_trellis, layout.value_bits)
    )
    each = INSTRUCTIONS[part]["trellis" if in_trellis else bits] * BY_DIM[part][min(max(dim, 64), 256)]
    if part == "keys" and bits < ROWS_FROM and not in_trellis:
        each += OF_LARGE_PARAMS * (options.param_dtype(call.load.layers[call.site].dtype) != EIGHT_BITS)
    queries = call.load.query_heads[call.site] // call.load.layers[call.site].heads
    return call.numbers * each * math.ceil(queries * call.lanes / ROWS) / WARP


def prepared(call: LaunchedOp) -> list[Kernel]:
    """The launches before the low-bit tier is read: the query in fragment order, what a group's logits share."""
    layout = getattr(call.load.options, "layout", None)
    if layout is None or not layout.is_quantised:
        return []
    made = []
    if call.center_rows:
        cost = call.cost(costs.share_of_center)
        fused = cost.flops / 2 / WARP
        shares = Kernel("add_shares", memory=cost.hbm, instructions=fused, floor=SMALLEST, tail=TAIL)
        made += [small("write_angles"), shares]
    zeros = 0.0 if call.load.options.has_key_trellis else OF_ZEROS
    return [*made, Kernel("prepare_query", instructions=call.numbers * zeros / WARP, floor=SMALLEST)]


def logit_bytes(call: LaunchedOp, lanes: int, each: float) -> float:
    """Bytes of the logits, `each` for every query head, lane and low-bit token."""
    return each * call.low * lanes * call.load.batch * call.load.query_heads[call.site]


def merge(call: LaunchedOp) -> Kernel:
    merged = MERGING * call.lanes * call.load.batch * call.load.query_heads[call.site]
    return Kernel("merge_splits", instructions=merged, floor=SMALLEST)


def score(call: LaunchedOp, lanes: int, memory: float) -> Kernel:
    return Kernel("score_tokens", memory=memory, instructions=SCORING * call.heads * call.low * lanes)


def keys_half(call: LaunchedOp, memory: float) -> list[Kernel]:
    """The launches that keep the low-bit tier's logits."""
    return [*prepared(call), Kernel("score_keys", memory=memory, instructions=instructions(call, "keys"), tail=TAIL)]


def decode_attention(call: LaunchedOp) -> list[Kernel]:
    cost, load = call.cost(costs.decode_attention), call.load
    pair, selects = costs.pair_bytes(load.options, load.layers[call.site]), bool(load.options.top_k)
    scores = 4 * call.heads * call.low if selects else 0
    logits = logit_bytes(call, call.lanes, bytes_of_logit(call.arguments["q"].dtype))
    keys, values = call.heads * call.low * pair.low_keys, call.heads * call.low * pair.low_values
    hidden = [small("hide_tokens")] if selects else []
    made = [
        *keys_half(call, keys + logits), *hidden, small("merge_splits"),
        Kernel("sum_values", memory=values + logits, instructions=instructions(call, "values"), tail=TAIL),
        Kernel("attend_pairs", memory=cost.hbm - keys - values - scores, floor=SMALLEST, tail=TAIL), merge(call),
    ]  # fmt: skip
    if selects:
        return [*made, score(call, 1, logits / call.lanes + scores)]
    return [*made, Kernel("fill", memory=4 * call.heads * call.low, floor=SMALLEST)]  # unused scores


def score_low_bit(call: LaunchedOp) -> list[Kernel]:
    cost, scored = call.cost(costs.score_low_bit), bool(call.arguments.get("scores", True))
    load = call.load
    keys = call.heads * call.low * costs.pair_bytes(load.options, load.layers[call.site]).low_keys
    logits = logit_bytes(call, call.lanes, bytes_of_logit(call.arguments["q"].dtype))
    read = logits + 4 * call.low * call.lanes * call.heads if scored else 0.0
    exact = Kernel("attend_pairs", memory=max(0.0, cost.hbm - keys - logits - read), floor=SMALLEST, tail=TAIL)
    made = [*keys_half(call, keys + logits), exact, merge(call)]
    return [*made, score(call, call.lanes, read)] if scored else made


def attend_scored(call: LaunchedOp) -> list[Kernel]:
    """The pairs in 16 bits wait for the gather, during which the low-bit values are summed."""
    cost, load = call.cost(costs.attend_scored), call.load
    exact = costs.exact_pairs(load.options, load.length)
    pairs = exact * call.heads * costs.pair_bytes(load.options, load.layers[call.site]).exact
    low = Kernel("sum_values", memory=cost.hbm - pairs, instructions=instructions(call, "values"), tail=TAIL)
    waiting = Kernel("attend_pairs", memory=pairs, floor=SMALLEST, tail=TAIL, waits=(CORRECTION,))
    return [small("hide_tokens"), low, waiting, merge(call)]


def select_kept(call: LaunchedOp) -> list[Kernel]:
    """`triton_select_logits`: one program for each KV head, of which a multiprocessor runs two."""
    each = SELECTING_KEPT + SELECTING_TOKEN * call.low
    alone = each / SCHEDULERS / (ISSUED * call.device.ghz * 1e9)
    memory = call.cost(costs.correct).hbm - call.cost(costs.correct).to_device
    return [Kernel("keep_best_of_logits", memory=max(0.0, memory), instructions=call.heads * each, floor=alone)]


def select(call: LaunchedOp) -> list[Kernel]:
    """`triton_select`: rounds over tiles, each of which keeps k, until one tile holds the rest. A single program takes
    as long as its warps' instructions, at least those of one warp on each scheduler."""
    length, made, last = bucket(call.load.length + 1), list[Kernel](), False
    while not last:
        tiles = math.ceil(length / TILE)
        warps = max(1, min(MOST_WARPS, math.ceil(length / OF_A_WARP)))
        alone = SELECTING * max(1.0, warps / SCHEDULERS) / (ISSUED * call.device.ghz * 1e9)
        made.append(Kernel("keep_best", instructions=call.heads * tiles * warps * SELECTING, floor=alone))
        length, last = tiles * call.load.options.top_k, tiles == 1
    return made


def gather(call: LaunchedOp, pairs_of: costs.CostOf, programs: int, stream: str) -> Kernel:
    """`triton_copy.gather`: each program takes one head after another."""
    cost, turns = call.cost(pairs_of), math.ceil(call.heads / min(call.heads, programs))
    return Kernel(
        "fetch_missing", stream=stream, memory=cost.to_device, to_device=cost.to_device,
        floor=turns * (FIND + ROUND_TRIP) - ROUND_TRIP, tail=SMALLEST + ROUND_TRIP,
    )  # fmt: skip


def correct(call: LaunchedOp) -> list[Kernel]:
    return [*select_kept(call), gather(call, costs.correct, call.heads, CORRECTION)]


def prefetch(call: LaunchedOp) -> list[Kernel]:
    return [gather(call, costs.prefetch, PROGRAMS, COPY)]


def offload(call: LaunchedOp) -> list[Kernel]:
    """The step's few pairs are written through on the main stream."""
    cost = call.cost(costs.offload)
    return [Kernel("write_host", memory=cost.hbm, to_host=cost.to_host, floor=SMALLEST)]


def append(call: LaunchedOp) -> list[Kernel]:
    layout = getattr(call.load.options, "layout", None)
    if layout is None or not layout.is_quantised:
        return [small("copy_groups"), small("write_recent")]
    rows = call.center_rows
    found = call.load.options.has_key_trellis or call.arguments.get("frequencies") is not None
    names = ["find_center"] if rows and found else []
    names += ["copy_groups"] if layout.is_rotated or rows else []
    return [small(name) for name in (*names, "quantize_groups", "write_recent")]


def fp8_attention(call: LaunchedOp) -> list[Kernel]:
    """`triton_fp8`: every cached pair is read once, one byte a number."""
    numbers = call.heads * call.load.length * 2 * call.load.layers[call.site].head_dim
    attended = Kernel("attend_rows", memory=numbers, instructions=OF_E4M3 * numbers / WARP, tail=TAIL)
    return [attended, small("add_new_pair")]


def keep_fp8(call: LaunchedOp) -> list[Kernel]:
    return [small("store_codes")]


def wait(call: LaunchedOp) -> list[Kernel]:
    return [Kernel("wait", gap=0.0)]


LAUNCHES: Mapping[str, Callable[[LaunchedOp], list[Kernel]]] = {
    made.__name__: made
    for made in (decode_attention, score_low_bit, attend_scored, correct, prefetch, offload, append, wait)
} | {"select_topk": select, "fp8_attention": fp8_attention, "keep_fp8": keep_fp8}
