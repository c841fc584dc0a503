"""Perplexity of text, each token fed through the cache as a decode step.

A window's last tokens are measured; the tokens before them are the prefill. Its attention is exact, except under an
eviction policy whose `eviction_block` is not "prompt".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from specache_compile.evaluation.runner import Runner

from .task import Bench, Cell, Outcome

MOST_STEPS = 128  # more windows are better than longer ones


def prefill_of(length: int) -> int:
    """How many tokens the prefill reads: half, or all but the last 128, of which the first is given."""
    return max(length // 2, length - MOST_STEPS)


def measure(runner: Runner, rows: Sequence[Sequence[int]]) -> Outcome:
    """exp of the mean negative log likelihood of the measured tokens. nats: each window's mean."""
    prefill, losses = prefill_of(len(rows[0])), []
    for batch in runner.batches(rows):
        ids = runner.ids(batch)
        logits = runner.forced_logits(ids, prefill).mT
        losses.append(F.cross_entropy(logits, ids[:, prefill + 1 :].cpu(), reduction="none"))
    nats = torch.cat(losses)
    mean = nats.mean().item()
    return Outcome(math.exp(mean), "perplexity", nats.numel(), {"nats": nats.mean(1).tolist()})


def cell(bench: Bench, length: int) -> Cell:
    rows = bench.windows_apart(length)
    return Cell(str(length), length, lambda runner: measure(runner, rows), {"steps": MOST_STEPS})
