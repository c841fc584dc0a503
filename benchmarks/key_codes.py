"""Keys in the trellis code: how near the default is, at 1 and 2 bits a key, where its keys are in the code that its
values are in.

    python benchmarks/key_codes.py                          SmolLM2, an hour on two cores; results/key_codes.json
    python benchmarks/key_codes.py --bits 1 --windows 2     some minutes
    python benchmarks/key_codes.py --resume                 the rows that --out does not have

What a code makes of the keys is stored in 8 bits, so that the tier can hold what no option codes so. Values have
8 bits, so that keys are judged alone, or 1 bit in the trellis as the default's have it, but with scales of the model's
dtype. Distances are those of `specache eval --tasks closeness`, 24 tokens behind a prompt. Bits of keys are those of
the code itself, with scales and zero points of 8 bits.

    levels     of each channel, over 64 tokens: what the default stores
    trellis    a key's channels, behind the mean of all keys that are stored at once: one scale a key. At 2 bits the
               four levels of `kernels/codes/trellis.py` are eight, and a key's own bits choose between two of each
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from behind_prompts import add_arguments, prepared
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from specache_compile.evaluation.intervals import interval
from specache_compile.evaluation.runner import Runner
from specache_compile.evaluation.settings import parse_setting, running
from specache_compile.evaluation.tasks.closeness import Continuations, measure
from specache_compile.kernels.codes.params import EIGHT_BITS, read_scale, stored_scale
from specache_compile.kernels.codes.quantize import dequantize_keys, quantize_keys
from specache_compile.kernels.codes.trellis import MEMORY, STATES, circle_of, followed, in_steps, levels_of
from specache_compile.kernels.movement import definition

# Of Gaussian numbers of unit variance, the distance of levels that leaves least of it, by bits.
STEP = {1: 0.8, 2: 0.5}
# (keys [B, H, T, d], group size, bits, zero point, which tokens are there) → what their code stands for, float32.
Rounded = Callable[[Tensor, int, int, str, Tensor | None], Tensor]


def by_levels(keys: Tensor, group_size: int, bits: int, zero_point: str, there: Tensor | None) -> Tensor:
    codes, params = quantize_keys(keys, group_size, bits, zero_point, EIGHT_BITS, there)
    return dequantize_keys(codes, params, bits)


def by_trellis(keys: Tensor, group_size: int, bits: int, zero_point: str, there: Tensor | None) -> Tensor:
    present = torch.ones_like(keys[..., :1], dtype=torch.bool) if there is None else there.expand_as(keys[..., :1])
    keys = keys.float()
    mean = (keys * present).sum(2, keepdim=True) / present.sum(2, keepdim=True).clamp(min=1)
    return mean + in_trellis(keys - mean, bits)


CODES: dict[str, Rounded] = {"levels": by_levels, "trellis": by_trellis}


def in_trellis(x: Tensor, bits: int) -> Tensor:
    """Vectors [..., d] as a trellis of so many bits a number has them, behind one scale of 8 bits each that makes the
    code unbiased: x·x / r·x for levels r."""
    square = (x * x).sum(-1, keepdim=True)
    step = (square / x.shape[-1]).sqrt() * STEP[bits]
    steps = in_steps(torch.where(step > 0, x / step, 0.0))
    levels = nearest_levels(steps.reshape(-1, circle_of(x.shape[-1])), bits)
    levels = levels.view(*x.shape[:-1], -1, 8).mT.flatten(-2)  # back from the order of steps
    scale = torch.where(square > 0, square / (levels * x).sum(-1, keepdim=True), 0.0)
    return levels * read_scale(stored_scale(scale, EIGHT_BITS))


def nearest_levels(circles: Tensor, bits: int) -> Tensor:
    """The levels r of the nearest path that goes round, of numbers [n, t] of unit step (`trellis.nearest_paths`)."""
    levels = torch.arange(2 << bits) - ((2 << bits) - 1) / 2
    # A subset is every fourth level; a step's window of bits says which, and its number takes the nearest of that.
    subsets = levels.view(-1, 4).T
    nearest = (circles[..., None, None] - subsets).abs().argmin(-1)  # [n, t, 4]
    found = subsets.gather(1, nearest.flatten(0, 1).T).T.view(nearest.shape)
    apart = (circles[..., None] - found).square()
    half = circles.shape[1] // 2
    free = circles.new_zeros(circles.shape[0], STATES)
    costs, choices = walked(apart.roll(half, 1), free)
    _, edge = followed(choices[half:], costs.argmin(1, keepdim=True))
    _, choices = walked(apart, torch.full_like(free, math.inf).scatter_(1, edge, 0.0))
    path, _ = followed(choices, edge)
    window = sum(path.roll(back, 1).long() << back for back in range(MEMORY + 1))
    return found.gather(2, levels_of(window)[..., None])[..., 0]


def walked(apart: Tensor, costs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """`trellis.walked`, by the squared distance [n, t, 4] of each number from each subset."""
    state = torch.arange(STATES)
    before = torch.stack([state >> 1, state >> 1 | STATES >> 1])
    subset = levels_of(torch.stack([state, state | STATES]))
    choices = []
    for distances in apart.unbind(1):
        first, second = (costs[:, before] + distances[:, subset]).unbind(1)
        choices.append(second < first)
        costs = torch.minimum(first, second)
    return costs, choices


class Storing:
    """`quantize_keys` of what a code of so many bits makes of the keys."""

    def __init__(self, code: str, bits: int) -> None:
        self.rounded, self.bits, self.calls = CODES[code], bits, 0

    def __call__(
        self, keys: Tensor, group_size: int, bits: int, zero_point: str, dtype: torch.dtype, there: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self.calls += 1
        rounded = self.rounded(keys, group_size, self.bits, zero_point, there)
        return quantize_keys(rounded, group_size, bits, "minimum", dtype, there)


def row_of(runner: Runner, known: Continuations, bits: int, code: str, value_bits: int) -> dict[str, Any]:
    storing = Storing(code, bits)
    setting = parse_setting(f"specache:key_bits=8,value_bits={value_bits},host_bits=8")
    with mock.patch.object(definition, "quantize_keys", storing), running(runner.model, setting, "inductor"):
        kinds = measure(runner, known).detail["kinds"]
    assert storing.calls, "no key was stored by the code"
    return {
        "key_bits": bits, "code": code, "value_bits": value_bits,
        "with_params": with_params(bits, code, runner.model.config.head_dim),
        **{kind: {name: kinds[kind][name] for name in ("kl", "each")} for kind in kinds},
    }  # fmt: skip


def with_params(bits: int, code: str, head_dim: int, group_size: int = 64) -> float:
    """Bits a number: with a scale and a zero point of each channel over a group, or a scale of each key, in 8 bits."""
    return bits + (16 / group_size if code == "levels" else 8 / head_dim)


def table(rows: list[dict[str, Any]]) -> str:
    """Beside the distances, what the trellis has over the levels of as many bits, window by window."""
    lines = []
    for row in rows:
        other = next(
            (r for r in rows if (r["key_bits"], r["value_bits"], r["code"]) ==
             (row["key_bits"], row["value_bits"], "levels")), row,
        )  # fmt: skip
        more = [mine - its for mine, its in zip(row["forced"]["each"], other["forced"]["each"], strict=True)]
        lines.append((
            f"{row['with_params']:.3f}", row["code"], row["value_bits"],
            *(f"{row[kind]['kl']:.4f} ± {interval(row[kind]['each']):.4f}" for kind in ("forced", "greedy", "sampled")),
            "" if other is row else f"{sum(more) / len(more):+.4f} ± {interval(more):.4f}",
        ))  # fmt: skip
    headers = ("bits of keys", "code", "of values", "forced, nats", "greedy", "sampled", "forced, over the levels")
    return tabulate(lines, headers, disable_numparse=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, "key_codes.json")
    parser.add_argument("--bits", type=int, nargs="+", default=[1, 2], choices=sorted(STEP), help="of a key (1 2)")
    parser.add_argument("--value-bits", type=int, nargs="+", default=[8, 1], choices=[1, 8], help="8: keys alone (8 1)")
    args = parser.parse_args(arguments)
    runner, known, results = prepared(args, "benchmarks/key_codes.py")
    cases = [(bits, code, values) for values in args.value_bits for bits in args.bits for code in CODES]
    for bits, code, values in tqdm(cases, disable=None):
        if not results.has(key_bits=bits, code=code, value_bits=values):
            results.add(row_of(runner, known, bits, code, values))
    print(table(results.rows))


if __name__ == "__main__":
    main()
