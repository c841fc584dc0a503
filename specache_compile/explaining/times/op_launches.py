"""The launches that a tier op makes on a CUDA device, and the work of each.

They follow the triton_*.py of kernels/ and kernels/movement/copy_stream.py, whose docstrings list their launches.
`step_time.py` computes times from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specache_compile.kernels.attention.kept_logits import LOGIT_BLOCK, bytes_of_logit, kept_dtype
from specache_compile.kernels.codes.params import EIGHT_BITS
from specache_compile.kernels.codes.records import ROWS_FROM, stored_dim
from specache_compile.kernels.state.center import tokens_of_one
from specache_compile.methods.field import LayerShape
from specache_compile.methods.slots import pairs_to_fetch
from specache_compile.passes.reading.nodes import hint
from specache_compile.runtime.state import bucket

from .devices import Device
from .workload import Pair, Workload, bytes_of, pair_bytes

STREAMS = MAIN, COPY = "main", "copy"

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
# Share of the tokens whose logits a selection by kept logits reads: for normal logits of standard deviation 2.
CANDIDATES = 0.1
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
    def layer(self) -> LayerShape:
        return self.load.layers[self.site]

    @property
    def heads(self) -> int:
        """KV heads of all rows."""
        return self.load.batch * self.layer.heads

    @property
    def query_heads(self) -> int:
        """Query heads of all rows."""
        return self.load.batch * self.load.query_heads[self.site]

    @property
    def lanes(self) -> int:
        return hint(self.arguments["q"].shape[2])

    @property
    def pair(self) -> Pair:
        return pair_bytes(self.load.options, self.layer)

    @property
    def low(self) -> int:
        """Tokens of the low-bit tier."""
        return self.load.options.low_bit_length(self.load.length)

    @property
    def fetched(self) -> int:
        """Pairs that a head selects for its slots."""
        return min(pairs_to_fetch(self.load.options, self.layer), self.low)

    @property
    def exact(self) -> int:
        """Pairs of a head's window and sinks."""
        return self.load.length - self.low + min(self.load.options.sinks, self.low)

    @property
    def numbers(self) -> float:
        """Stored numbers of the low-bit tier's keys, or of its values."""
        return self.heads * self.low * stored_dim(self.layer.head_dim)

    @property
    def logits(self) -> float:
        """Bytes of the kept logits, one for every query head, lane and low-bit token."""
        return bytes_of_logit(self.arguments["q"].dtype) * self.low * self.lanes * self.query_heads

    def given(self, *names: str) -> float:
        """Bytes of these arguments for the rows of `load`, to which they are proportional."""
        tensors = [self.arguments[name] for name in names]
        return sum(bytes_of(one) * self.load.batch / hint(one.shape[0]) for one in tensors)


def small(name: str) -> Kernel:
    """A kernel of few programs."""
    return Kernel(name, floor=SMALLEST)


def instructions(call: LaunchedOp, part: str) -> float:
    """A warp's instructions of the keys' or the values' half; 0 where nothing is quantised (only products)."""
    layout = getattr(call.load.options, "layout", None)
    if layout is None or not layout.is_quantised:
        return 0.0
    options, dim = call.load.options, stored_dim(call.layer.head_dim)
    in_trellis, bits = (
        (options.has_key_trellis, layout.key_bits) if part == "keys" else (options.has_trellis, layout.value_bits)
    )
    each = INSTRUCTIONS[part]["trellis" if in_trellis else bits] * BY_DIM[part][min(max(dim, 64), 256)]
    if part == "keys" and bits < ROWS_FROM and not in_trellis:
        each += OF_LARGE_PARAMS * (options.param_dtype(call.layer.dtype) != EIGHT_BITS)
    queries = call.load.query_heads[call.site] // call.layer.heads
    return call.numbers * each * math.ceil(queries * call.lanes / ROWS) / WARP


def prepared(call: LaunchedOp) -> list[Kernel]:
    """The launches before the low-bit tier is read: the query in fragment order, what a group's logits share."""
    options = call.load.options
    if not options.layout.is_quantised:
        return []
    made, rows = [], options.center_rows(call.layer)
    if rows:  # a number for each query row and each token or group, written and read
        shares = call.query_heads * call.lanes * (call.low // tokens_of_one(rows, options.group_size))
        fused = 2 * shares * call.layer.head_dim / WARP
        made = [
            small("write_angles"),
            Kernel("add_shares", memory=8 * shares, instructions=fused, floor=SMALLEST, tail=TAIL),
        ]
    zeros = 0.0 if options.has_key_trellis else OF_ZEROS
    return [*made, Kernel("prepare_query", instructions=call.numbers * zeros / WARP, floor=SMALLEST)]


def merge(call: LaunchedOp) -> Kernel:
    return Kernel("merge_splits", instructions=MERGING * call.lanes * call.query_heads, floor=SMALLEST)


def score(call: LaunchedOp, lanes: int, memory: float) -> Kernel:
    return Kernel("score_tokens", memory=memory, instructions=SCORING * call.heads * call.low * lanes)


def keys_half(call: LaunchedOp) -> list[Kernel]:
    """The launches that keep the low-bit tier's logits."""
    memory = call.heads * call.low * call.pair.low_keys + call.logits
    return [*prepared(call), Kernel("score_keys", memory=memory, instructions=instructions(call, "keys"), tail=TAIL)]


def sum_values(call: LaunchedOp, more: float = 0.0) -> Kernel:
    """The low-bit tier's values by their kept logits. more: further bytes."""
    memory = call.heads * call.low * call.pair.low_values + call.logits + more
    return Kernel("sum_values", memory=memory, instructions=instructions(call, "values"), tail=TAIL)


def attend_pairs(memory: float, waits: tuple[str, ...] = ()) -> Kernel:
    return Kernel("attend_pairs", memory=memory, floor=SMALLEST, tail=TAIL, waits=waits)


def decode_attention(call: LaunchedOp) -> list[Kernel]:
    selects, scores = bool(call.load.options.top_k), 4 * call.heads * call.low
    pairs = call.heads * (call.exact + call.fetched) * call.pair.exact
    made = [
        *keys_half(call), *([small("hide_tokens")] if selects else []), small("merge_splits"), sum_values(call),
        attend_pairs(pairs + 2 * call.given("q", "k")), merge(call),
    ]  # fmt: skip
    if selects:
        return [*made, score(call, 1, call.logits / call.lanes + scores)]
    return [*made, Kernel("fill", memory=scores, floor=SMALLEST)]  # unused scores


def score_low_bit(call: LaunchedOp) -> list[Kernel]:
    keys = attend_pairs(call.heads * call.exact * call.pair.exact / 2 + call.given("q"))
    made = [*keys_half(call), keys, merge(call)]
    if not call.arguments.get("scores", True):
        return made
    return [*made, score(call, call.lanes, call.logits + 4 * call.low * call.lanes * call.heads)]


def attend_scored(call: LaunchedOp) -> list[Kernel]:
    """The pairs in 16 bits wait for the gather, during which the low-bit values are summed."""
    pairs = call.heads * (call.exact + call.fetched) * call.pair.exact
    low = sum_values(call, 2 * call.given("q"))
    return [small("hide_tokens"), low, attend_pairs(pairs, (COPY,)), merge(call)]


def select_kept(call: LaunchedOp) -> list[Kernel]:
    """`triton_select_logits`: one program for each KV head, of which a multiprocessor runs two.

    It reads the bases and the candidates' logits. What fetched pairs grow by in 16 bits counts here too.
    """
    each = SELECTING_KEPT + SELECTING_TOKEN * call.low
    alone = each / SCHEDULERS / (ISSUED * call.device.ghz * 1e9)
    of_token = 4 / LOGIT_BLOCK + CANDIDATES * kept_dtype(call.arguments["q"].dtype).itemsize
    grown = call.heads * call.fetched * call.load.corrected * (call.pair.exact - call.pair.on_host)
    memory = of_token * call.low * call.query_heads + max(0.0, grown)
    return [Kernel("keep_best_of_logits", memory=memory, instructions=call.heads * each, floor=alone)]


def select(call: LaunchedOp) -> list[Kernel]:
    """`triton_select`: rounds over tiles, each of which keeps k, until one tile holds the rest. A single program takes
    as long as its warps' instructions, at least those of one warp on each scheduler."""
    length, made, last = bucket(call.load.length + 1), list[Kernel](), False
    while not last:
        tiles = math.ceil(length / TILE)
        warps = max(1, min(MOST_WARPS, math.ceil(length / OF_A_WARP)))
        alone = SELECTING * max(1.0, warps / SCHEDULERS) / (ISSUED * call.device.ghz * 1e9)
        made.append(Kernel("keep_best", instructions=call.heads * tiles * warps * SELECTING, floor=alone))
        length, last = tiles * pairs_to_fetch(call.load.options, call.layer), tiles == 1
    return made


def gather(call: LaunchedOp, share: float, programs: int, stream: str) -> Kernel:
    """`triton_copy.gather` of a share of the selected pairs: each program takes one head after another."""
    turns = math.ceil(call.heads / min(call.heads, programs))
    fetched = call.heads * call.fetched * share * call.pair.on_host
    return Kernel(
        "fetch_missing", stream=stream, memory=fetched, to_device=fetched,
        floor=turns * (FIND + ROUND_TRIP) - ROUND_TRIP, tail=SMALLEST + ROUND_TRIP,
    )  # fmt: skip


def correct(call: LaunchedOp) -> list[Kernel]:
    return [*select_kept(call), gather(call, call.load.corrected, call.heads, COPY)]


def prefetch(call: LaunchedOp) -> list[Kernel]:
    return [gather(call, 1 - call.load.reuse, PROGRAMS, COPY)]


def offload(call: LaunchedOp) -> list[Kernel]:
    """The step's few pairs are written through on the main stream."""
    pairs = call.heads * hint(call.arguments["k"].shape[2])
    return [Kernel("write_pairs", memory=pairs * call.pair.exact, to_host=pairs * call.pair.on_host, floor=SMALLEST)]


def append(call: LaunchedOp) -> list[Kernel]:
    options = call.load.options
    found = options.has_key_trellis or call.arguments.get("frequencies") is not None
    names = ["find_center"] if options.center_rows(call.layer) and found else []
    return [small(name) for name in (*names, "store_groups", "write_pairs")]


def fp8_attention(call: LaunchedOp) -> list[Kernel]:
    """`triton_fp8`: every cached pair is read once, one byte a number."""
    numbers = call.heads * call.load.length * 2 * call.layer.head_dim
    attended = Kernel("attend_rows", memory=numbers, instructions=OF_E4M3 * numbers / WARP, tail=TAIL)
    return [attended, small("merge_splits")]


def keep_fp8(call: LaunchedOp) -> list[Kernel]:
    return [small("write_pairs")]


def wait(call: LaunchedOp) -> list[Kernel]:
    return [Kernel("wait", gap=0.0)]


LAUNCHES: Mapping[str, Callable[[LaunchedOp], list[Kernel]]] = {
    made.__name__: made
    for made in (decode_attention, score_low_bit, attend_scored, correct, prefetch, offload, append, wait)
} | {"select_topk": select, "fp8_attention": fp8_attention, "keep_fp8": keep_fp8}
