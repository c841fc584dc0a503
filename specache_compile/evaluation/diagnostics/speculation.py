"""What the fetched pairs cover when the speculative token chooses them, and when the output token does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from specache_compile.evaluation.runner import decode, read
from specache_compile.evaluation.settings import Setting, running
from specache_compile.runtime.stats import HitRate, stats

from .inspected import Inspected, session_of
from .point import Point

COUNTS = (4, 16, 64)
BITS = (1, 2)
CHOOSERS = {True: "speculative token", False: "output token"}


@dataclass(frozen=True)
class Greedy:
    """A greedy continuation: its hit rate, and the share of steps whose speculative token was then said."""

    hit_rate: HitRate
    agreement: float


def points(run: Inspected) -> list[Point]:
    """In greedy runs, the true attention's mass in slots, window and new pair, and the share of its top k there."""
    found = []
    for bits in BITS:
        for k in COUNTS:
            for speculate, chooser in CHOOSERS.items():
                hit = continued(run, bits, k, speculate).hit_rate
                count = run.steps * run.ids.shape[0]
                found.append(Point(f"mass, {bits}-bit, {chooser}", k, hit.mass, count))
                found.append(Point(f"top k, {bits}-bit, {chooser}", k, hit.top_k, count))
    return found


def continued(run: Inspected, bits: int, k: int, speculate: bool) -> Greedy:
    """The continuation under these options, run once."""
    key = bits, k, speculate
    if key not in run.results:
        options = {"setting": "paper", "bits": bits, "top_k": k, "speculate": speculate, "hit_rate": True}
        run.results[key] = continue_greedily(run, options)
        run.tick()
    return run.results[key]


def continue_greedily(run: Inspected, options: dict[str, Any]) -> Greedy:
    """`steps` steps behind the prefill, each on the token that the model itself chose."""
    tokens, guesses = [], []
    with running(run.model, Setting("specache", tuple(options.items())), run.lowering):
        cache, logits = read(run.model, run.ids[:, : run.prefill])
        for _ in range(run.steps):
            tokens.append(logits.argmax(-1).to(run.ids.device))
            logits = decode(run.model, cache, tokens[-1])
            guesses.append(session_of(cache).progress.guess)
        hit = stats(run.model).hit_rate
    assert hit is not None
    # A step's logits give the next token; its guess is the token after that.
    right = [guess == said for guess, said in zip(guesses, tokens[2:], strict=False) if guess is not None]
    return Greedy(hit, torch.cat(right).float().mean().item() if right else math.nan)
