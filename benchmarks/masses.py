"""Budgets by mass: how near a head's attention is, and how many pairs it wants, where it fetches no more of its k than
hold a share of its low-bit attention.

    python benchmarks/masses.py                             SmolLM2, an hour on two cores; results/masses.json
    python benchmarks/masses.py --masses 1 0.8 --windows 2  some minutes
    python benchmarks/masses.py --resume                    the rows that --out does not have

The default otherwise: each token's own choice, of at most k pairs. Distances are of the text's own 24 tokens behind a
prompt, as `specache eval --tasks closeness` has them; pairs are counted over these, 24 greedy and 24 sampled ones.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from behind_prompts import add_arguments, prepared
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from specache_compile.evaluation.intervals import interval
from specache_compile.evaluation.runner import Runner
from specache_compile.evaluation.settings import parse_setting, running
from specache_compile.evaluation.tasks.closeness import Continuations, measure
from specache_compile.kernels import op as ops
from specache_compile.kernels.movement import definition
from specache_compile.kernels.movement.definition import refill
from specache_compile.kernels.state.stored_tiers import EMPTY


class ByMass:
    """`select_topk` of those pairs alone that are needed for a share of each head's low-bit attention; counts them."""

    def __init__(self, mass: float, layers: int) -> None:
        self.mass, self.layers, self.calls = mass, layers, 0
        self.wanted: dict[int, list[float]] = defaultdict(list)  # by layer: pairs a head
        self.fetched: list[float] = []  # pairs a head

    def __call__(self, scores: Tensor, wanted: Tensor) -> None:
        best, index = scores.topk(min(wanted.shape[-1], scores.shape[-1]), dim=-1)
        before = best.cumsum(-1) - best
        drop = (best < 0) | (before >= self.mass * scores.clamp(min=0).sum(-1, keepdim=True))
        wanted.fill_(EMPTY)
        wanted[..., : index.shape[-1]] = index.masked_fill(drop, EMPTY)
        self.wanted[self.calls % self.layers].append(float((wanted >= 0).sum(-1).float().mean()))
        self.calls += 1

    def refill(self, wanted: Tensor, host: Tensor, slots: Tensor, slot_index: Tensor, fetched: Tensor) -> None:
        there = (wanted.unsqueeze(-1) == slot_index.unsqueeze(-2)).any(-1)
        self.fetched.append(float(((wanted >= 0) & ~there).sum(-1).float().mean()))
        refill(wanted, host, slots, slot_index, fetched)


@contextmanager
def selecting(choose: ByMass) -> Iterator[None]:
    """Within it, corrections choose so, in PyTorch."""
    correct = ops._registry["correct"]
    ops._registry["correct"] = replace(correct, fused=None)
    try:
        with (
            mock.patch.object(definition, "select_topk", choose),
            mock.patch.object(definition, "refill", choose.refill),
        ):
            yield
    finally:
        ops._registry["correct"] = correct


def row_of(runner: Runner, known: Continuations, top_k: int, mass: float) -> dict[str, Any]:
    layers = runner.model.config.num_hidden_layers
    choose = ByMass(mass, layers)
    with selecting(choose), running(runner.model, parse_setting(f"specache:top_k={top_k}"), "inductor"):
        kinds = measure(runner, known).detail["kinds"]
    wanted = [sum(choose.wanted[layer]) / len(choose.wanted[layer]) for layer in range(layers)]
    return {
        "top_k": top_k, "mass": mass, "wanted": sum(wanted) / layers, "wanted by layer": wanted,
        "fetched": sum(choose.fetched) / len(choose.fetched), "kl": kinds["forced"]["kl"],
        "each": kinds["forced"]["each"],
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Beside the distance, what it has over that of the first row, window by window."""
    lines = []
    for row in rows:
        more = [mine - first for mine, first in zip(row["each"], rows[0]["each"], strict=True)]
        lines.append(
            (
                row["top_k"], f"{row['mass']:.2f}", f"{row['wanted']:.1f}",
                f"{min(row['wanted by layer']):.1f} to {max(row['wanted by layer']):.1f}", f"{row['fetched']:.1f}",
                f"{row['kl']:.5f} ± {interval(row['each']):.5f}",
                f"{sum(more) / len(more):+.5f} ± {interval(more):.5f}",
            )
        )  # fmt: skip
    headers = ("k", "mass", "wanted", "by layer", "fetched", "KL, nats", "over the first row's")
    return tabulate(lines, headers, disable_numparse=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, "masses.json")
    parser.add_argument("--top-k", type=int, nargs="+", default=[64, 128], help="the most pairs a head (64 128)")
    parser.add_argument("--masses", type=float, nargs="+", default=[1.0, 0.9, 0.8, 0.6, 0.4], help="(1 .9 .8 .6 .4)")
    args = parser.parse_args(arguments)
    if bad := [mass for mass in args.masses if not 0 < mass <= 1]:
        parser.error(f"--masses {bad[0]:g}: give shares above 0, at most 1")
    runner, known, results = prepared(args, "benchmarks/masses.py")
    cases = [(k, mass) for k in args.top_k for mass in args.masses]
    for k, mass in tqdm(cases, disable=None):
        if not results.has(top_k=k, mass=mass):
            results.add(row_of(runner, known, k, mass))
    print("Pairs a layer, KV head and token: wanted, and fetched since the slots lacked them")
    print(table(results.rows))


if __name__ == "__main__":
    main()
