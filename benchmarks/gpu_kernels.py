"""Time of every Triton kernel, its bytes per second, and its share of the measured bandwidth.

    python benchmarks/gpu_kernels.py    (--smoke: small shapes in Triton's interpreter; its figures mean nothing)

Shapes are one layer of Llama-3-8B in bfloat16. The limit is a copy within the device, or over PCIe for kernels that
access pinned memory. tests/kernels compares each kernel with a float64 model.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from measuring import WARM_UPS, limits, milliseconds, parsed, parser_of
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from specache_compile.bench.results import Results
from specache_compile.kernels.codes.records import stored_dim
from specache_compile.kernels.decode import triton_scored
from specache_compile.kernels.memory import host_memory
from specache_compile.kernels.movement import cpp_tiers, triton_append, triton_copy, triton_select
from specache_compile.kernels.state.cursor import CURSOR_SIZE, LENGTH, LOW_BIT, NEXT_LOW_BIT, new_cursor
from specache_compile.kernels.state.layout import StoredTiers
from specache_compile.kernels.state.page_table import PAGE
from specache_compile.kernels.state.stored_pairs import ROUNDED, rounded_width
from specache_compile.methods.field import LayerShape, LayerState
from specache_compile.methods.specache import SpecacheOptions
from specache_compile.paging.pool import pages_for
from specache_compile.runtime.state import empty, fields_of

QUERY_HEADS, HEADS, HEAD_DIM, LANES = 32, 8, 128, 2
# Beside the settings that the command names: bits of keys and of values of a rotated tier, and the keys' code.
VARIANTS = ((2, 1, "levels"), (2, 2, "levels"), (1, 1, "trellis"))
# Enough sets of inputs that none of them is still in the L2 cache when its turn comes again.
ROTATED_BYTES, MOST_SETS = 512 << 20, 16
# Clock cycles, about a millisecond: longer than the host takes to launch any of the kernels.
PAUSE = 2_000_000


@dataclass(frozen=True)
class KernelSetting:
    """One layer's cache: bits of the low-bit tier, or of its keys alone, cached tokens, rows."""

    bits: int
    context: int
    batch: int
    dtype: torch.dtype
    top_k: int = 64
    value_bits: int | None = None
    rotate: bool = False
    key_code: str = "levels"

    @property
    def options(self) -> SpecacheOptions:
        return SpecacheOptions(
            setting="best" if self.rotate else "paper", bits=self.bits, value_bits=self.value_bits, top_k=self.top_k,
            key_code=self.key_code,
        )  # fmt: skip

    @property
    def names(self) -> dict[str, Any]:
        """The columns of a row that describe the setting."""
        layout = self.options.layout
        return {
            "bits": layout.key_bits, "value_bits": layout.value_bits, "rotated": layout.is_rotated,
            "key_code": self.key_code, "context": self.context, "batch": self.batch,
        }  # fmt: skip

    @property
    def low_bit(self) -> int:
        return self.options.low_bit_length(self.context)

    @property
    def pairs(self) -> int:
        return self.batch * HEADS * self.low_bit


def variants(context: int, batch: int, dtype: torch.dtype) -> list[KernelSetting]:
    return [
        KernelSetting(b, context, batch, dtype, value_bits=v, rotate=True, key_code=code) for b, v, code in VARIANTS
    ]


class Inputs:
    """A layer's state with random contents, and the new tokens of one decode step."""

    def __init__(self, setting: KernelSetting, device: torch.device, seed: int) -> None:
        self.setting = setting
        generator = torch.Generator(device).manual_seed(seed)
        shape = LayerShape(HEADS, HEAD_DIM, setting.dtype, device)
        pages, options = pages_for(setting.context + 1), setting.options
        sizes = {True: (setting.batch * pages, PAGE), False: (setting.batch, pages * PAGE)}
        self.state = {
            field.name: empty(field, options, shape, *sizes[field.by_page]) for field in fields_of(options, shape)
        }
        fill(self.state, setting, generator)
        self.cursor = new_cursor(device, setting.batch, pages)
        self.cursor[:, CURSOR_SIZE:] = torch.arange(setting.batch * pages, device=device).view(-1, pages)
        self.point(setting.context, 1)

        def random(heads: int) -> Tensor:
            shape = (setting.batch, heads, LANES, HEAD_DIM)
            return torch.randn(shape, generator=generator, device=device).to(setting.dtype)

        self.q, self.k, self.v = random(QUERY_HEADS), random(HEADS), random(HEADS)
        self.scores = torch.rand(setting.batch, HEADS, pages * PAGE, generator=generator, device=device)
        self.scores[:, :, setting.low_bit :] = -1.0

    def point(self, length: int, tokens: int) -> None:
        self.cursor[:, LENGTH] = length
        self.cursor[:, LOW_BIT] = self.setting.options.low_bit_length(length)
        self.cursor[:, NEXT_LOW_BIT] = self.setting.options.low_bit_length(length + tokens)

    @property
    def read(self) -> tuple[Any, ...]:
        """The last arguments of an attention: tiers, layout, scale, softcap."""
        tiers = [self.state[name] for name in StoredTiers._fields]
        return tiers, [int(value) for value in self.setting.options.layout], HEAD_DIM**-0.5, None

    def attend(self, attend: Any) -> tuple[Tensor, Tensor]:
        slots = self.state["slots"], self.state["slot_index"]
        return attend(self.q, self.k, self.v, None, None, self.cursor, *slots, *self.read)

    def score(self, score: Any) -> tuple[Tensor, Tensor, Tensor]:
        return score(self.q, self.k, self.v, None, None, self.cursor, *self.read)

    def attend_scored(self, attend: Any, *logits: Tensor) -> Tensor:
        slots, slot_index = self.state["slots"], self.state["slot_index"]
        chosen = (slot_index, slots, slot_index)
        return attend(self.q, self.k, self.v, None, None, self.cursor, *logits, *chosen, *self.read)


def fill(state: LayerState, setting: KernelSetting, generator: torch.Generator) -> None:
    """Fill with random contents; slots hold distinct tokens, and so does the selection."""
    for field, tensor in state.items():
        if tensor.dtype == torch.uint8:
            tensor.random_(0, 256 if field == "codes" else 120, generator=generator)  # scales are numbers then
        elif tensor.is_floating_point() and field != "host":
            tensor.normal_(generator=generator)
    state["host"].fill_(0.5)
    state["sink_index"].copy_(torch.arange(state["sink_index"].shape[2]))
    if setting.top_k:
        stride = setting.low_bit // (2 * setting.top_k)
        tokens = torch.arange(setting.top_k, device=state["slots"].device, dtype=torch.int32) * stride
        state["slot_index"].copy_(tokens.expand_as(state["slot_index"]))
        state["selected"].copy_((tokens + setting.low_bit // 2).expand_as(state["selected"]))


def rotated(setting: KernelSetting, device: torch.device, repeats: int) -> list[Inputs]:
    first = Inputs(setting, device, 0)
    size = sum(t.nbytes for name, t in first.state.items() if name != "host")
    turns = WARM_UPS + repeats if device.type == "cuda" else 1
    sets = min(MOST_SETS, turns, 1 + ROTATED_BYTES // max(1, size))
    return [first, *(Inputs(setting, device, seed) for seed in range(1, sets))]


def fetch_arguments(x: Inputs) -> tuple[Tensor, ...]:
    selected, *rest = (x.state[name] for name in ("selected", "host", "slots", "slot_index", "fetched"))
    return (selected, x.cursor, *rest)


def milliseconds_on_device(
    run: Callable[[int], object], device: torch.device, repeats: int, before: Callable[[int], object] = lambda i: None
) -> float:
    """`milliseconds` of the kernels alone: the GPU pauses first, so that all of them are launched when it begins."""

    def pause(i: int) -> None:
        before(i)
        if device.type == "cuda":
            torch.cuda._sleep(PAUSE)

    return milliseconds(run, device, repeats, pause)


def figures(
    kernel: str, setting: KernelSetting, against: str, size: int, ms: float, limit: dict[str, float]
) -> dict[str, Any]:
    """A row: `size` bytes in `ms`, beside the limit that the kernel has."""
    rate = size / ms / 1e6
    return {
        "kernel": kernel, **setting.names, "ms": ms, "bytes": size, "GB/s": rate, "limit": against,
        "share": rate / limit[against],
    }  # fmt: skip


def rows_of(
    setting: KernelSetting, device: torch.device, repeats: int, limit: dict[str, float]
) -> Iterator[dict[str, Any]]:
    """The kernels of a decode step at one setting."""
    sets = rotated(setting, device, repeats)

    def turn(i: int) -> Inputs:
        return sets[i % len(sets)]

    def row(kernel: str, against: str, size: int, run: Any, before: Any = lambda i: None) -> dict[str, Any]:
        ms = milliseconds_on_device(run, device, repeats, before)
        return figures(kernel, setting, against, size, ms, limit)

    state = sets[0].state
    item = setting.dtype.itemsize
    exact = setting.batch * HEADS * 2 * HEAD_DIM * item
    on_host = setting.batch * HEADS * cpp_tiers.pair_bytes(state["host"])  # one token's pairs
    layout = setting.options.layout
    low_keys, low_values = (
        setting.pairs * (stored_dim(HEAD_DIM) * bits // 8 + state[scales].nbytes // tokens_of(state))
        for bits, scales in ((layout.key_bits, "key_params"), (layout.value_bits, "value_params"))
    )
    low = low_keys + low_values
    kept = exact * (setting.top_k + setting.context - setting.low_bit)
    # The last lane's logits, written and read in half precision, and the scores.
    scored = setting.pairs * (4 * QUERY_HEADS // HEADS + 4) if setting.top_k else 0
    yield row("attention", "copy", low + kept + scored, lambda i: turn(i).attend(triton_scored.decode_attention))
    if not setting.top_k:
        return
    logits = [x.score(triton_scored.score_low_bit)[:2] for x in sets]
    window = exact * (setting.context - setting.low_bit)
    lanes = 4 * LANES * setting.pairs
    made = sum(kept.nbytes for kept in logits[0]) * setting.pairs // tokens_of(state)
    yield row(
        "scores alone", "copy", low_keys + window // 2 + 2 * made + lanes,
        lambda i: turn(i).score(triton_scored.score_low_bit),
    )  # fmt: skip
    yield row(
        "attention from scores", "copy", made + low_values + kept,
        lambda i: turn(i).attend_scored(triton_scored.attend_scored, *logits[i % len(sets)]),
    )  # fmt: skip
    if setting.rotate:  # what follows knows nothing of the layout
        return
    scores = sets[0].scores.nbytes
    yield row(
        "selection", "copy", scores, lambda i: triton_select.select_topk(turn(i).scores, turn(i).state["selected"])
    )
    for reuse in (0.0, 0.5, 0.75, 1.0):
        kept_slots = round(reuse * setting.top_k)

        def forget(i: int, kept_slots: int = kept_slots) -> None:
            turn(i).state["slot_index"].copy_(turn(i).state["selected"])
            turn(i).state["slot_index"][:, :, kept_slots:] = -1

        moved = on_host * (setting.top_k - kept_slots)
        fetch = row("gather", "to device", moved, lambda i: triton_copy.gather(*fetch_arguments(turn(i))), forget)
        yield fetch | {"reuse": reuse}
    yield row("write through", "to host", on_host * LANES, lambda i: write_through(turn(i)))


def tokens_of(state: LayerState) -> int:
    """Pairs that the low-bit tier has room for, over all rows and heads."""
    return state["codes"].shape[0] * state["codes"].shape[1] * state["codes"].shape[2]


def write_through(x: Inputs) -> None:
    triton_copy.write_through(x.k, x.v, x.cursor, x.state["host"])


def quantise_row(setting: KernelSetting, device: torch.device, repeats: int, limit: dict[str, float]) -> dict[str, Any]:
    """A whole context appended at once, as a prefill does."""
    x = Inputs(setting, device, 0)
    shape = (setting.batch, HEADS, setting.context, HEAD_DIM)
    k, v = (torch.randn(shape, device=device).to(setting.dtype) for _ in range(2))
    x.point(0, setting.context)
    given = [x.state[field] for field in StoredTiers._fields]
    settings = (*setting.options.layout, setting.options.zero_point)
    ms = milliseconds_on_device(
        lambda i: triton_append.append(k, v, None, x.cursor, *given, *settings), device, repeats
    )
    written = setting.pairs * sum(t.nbytes for t in given[:-1]) // tokens_of(x.state)
    size = k.nbytes + v.nbytes + written + x.state["recent"].nbytes
    return figures("quantise", setting, "copy", size, ms, limit)


def large_gathers(device: torch.device, size: int, smoke: bool) -> Iterator[dict[str, Any]]:
    """GB/s of gathers over `size` bytes of host memory.

    Pairs have 16 or 8 bits and even or random distances. The number of programs is that of a fetch ahead or of a
    correction.
    """
    heads, top_k, d = (4, 8, 16) if smoke else (192, 64, 128)
    slots = torch.zeros(1, heads, top_k, 2, d, dtype=torch.bfloat16 if device.type == "cuda" else torch.half).to(device)
    index = torch.full((1, heads, top_k), -1, dtype=torch.int32, device=device)
    moved = torch.zeros(1, dtype=torch.int64, device=device)
    for stored, width in ((slots.dtype, d), (ROUNDED, rounded_width(d))):
        tokens = size // (heads * 2 * width * stored.itemsize) // PAGE * PAGE
        host = host_memory.host_empty((tokens // PAGE, heads, PAGE, 2, width), stored, device).fill_(1)
        cursor = new_cursor(device, 1, len(host))
        cursor[:, CURSOR_SIZE:] = torch.arange(len(host), device=device)
        even = torch.arange(top_k, dtype=torch.int32).mul(tokens // top_k).expand(1, heads, -1)
        orders = {"even": even, "random": torch.randint(tokens, (1, heads, top_k), dtype=torch.int32)}
        for (order, first), programs in itertools.product(orders.items(), (triton_copy.PROGRAMS, heads)):
            turns = [((first + turn * 977) % tokens).to(device).contiguous() for turn in range(10)]

            given = (cursor, host, slots, index, moved, programs)

            def fetch(i: int, turns: list[Tensor] = turns, given: tuple[Any, ...] = given) -> None:
                triton_copy.gather(turns[i % len(turns)], *given)

            took = milliseconds(fetch, device, 10, lambda i: index.fill_(-1))
            rate = heads * top_k * 2 * width * stored.itemsize / took / 1e6
            yield {"bits": 8 * stored.itemsize, "distances": order, "programs": programs, "GB/s": rate}
        del host
        host_memory.release_host_memory()


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768], help="tokens (8192 32768)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16], help="rows (1 16)")
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 2, 1], choices=(1, 2, 4, 8, 16), help="(16 2 1)")
    parser.add_argument("--repeats", type=int, default=50, help="timed runs of each kernel (default: 50)")
    parser.add_argument("--tier-gib", type=float, metavar="GIB", help="only time gathers over so much host memory")
    args, device = parsed(parser, "gpu_kernels", arguments)
    if args.tier_gib:
        size = round(args.tier_gib * 2**30)
        print(tabulate(list(large_gathers(device, size, args.smoke)), headers="keys", floatfmt=".0f"))
        return
    if args.smoke:
        args.contexts, args.batches, args.repeats = [256], [1], 1
    # The interpreter's bfloat16 is not the hardware's.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    results = Results(
        args.out, "benchmarks/gpu_kernels.py", device, args.resume, smoke=args.smoke, repeats=args.repeats
    )
    limit = results.once("limits", lambda: limits(device, 1 << (20 if args.smoke else 30), args.repeats))
    settings = [KernelSetting(b, c, n, dtype) for c in args.contexts for n in args.batches for b in args.bits]
    rotated_ones = [variant for c in args.contexts for n in args.batches for variant in variants(c, n, dtype)]
    settings += rotated_ones[: 1 if args.smoke else None]
    try:
        for setting in tqdm([setting for setting in settings if not results.find(**setting.names)], unit="setting"):
            rows = list(rows_of(setting, device, args.repeats, limit))
            if setting.bits < 16:
                rows.append(quantise_row(setting, device, args.repeats, limit))
            results.add(*rows)
    except KeyboardInterrupt:
        print("interrupted: the settings below are finished")
    print(tabulate(results.rows, headers="keys", floatfmt=",.3f"))
    print("limits, GB/s: " + ", ".join(f"{name} {rate:.0f}" for name, rate in limit.items()))


if __name__ == "__main__":
    main()
