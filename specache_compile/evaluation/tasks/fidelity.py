"""How far the logits are from the full cache's on the same forced tokens: KL divergence and top-1 agreement."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specache_compile.evaluation.runner import Runner, chunks

from .perplexity import MOST_STEPS, bucket_means, prefill_of
from .task import Bench, Cell, Outcome


def measure(runner: Runner, rows: Sequence[Sequence[int]]) -> Outcome:
    """The score is the share of steps whose most likely token is the full cache's; KL(full || method) in nats."""
    prefill = prefill_of(len(rows[0]))
    agreements, divergences = [], []
    for batch in chunks(rows, runner.batch_size):
        ids = runner.ids(batch)
        with runner.uncompiled():
            full = runner.forced_logits(ids, prefill)
        ours = runner.forced_logits(ids, prefill)
        agreements.append((full.argmax(-1) == ours.argmax(-1)).float())
        divergences.append(divergence(full, ours))
    agreement, kl = torch.cat(agreements), torch.cat(divergences)
    detail = {"kl": kl.mean().item(), "kl_by_position": bucket_means(kl, prefill),
              "by_position": bucket_means(agreement, prefill)}  # fmt: skip
    return Outcome(agreement.mean().item(), "top-1 agreement", agreement.numel(), detail)


def divergence(full: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """KL(full || ours) in nats over the last dimension of logits."""
    log_full, log_ours = full.log_softmax(-1), ours.log_softmax(-1)
    return (log_full.exp() * (log_full - log_ours)).sum(-1)


def cells(bench: Bench) -> list[Cell]:
    """One cell a length."""

    def cell(length: int) -> Cell:
        rows = bench.windows_apart(length)
        return Cell(str(length), length, lambda runner: measure(runner, rows), {"steps": MOST_STEPS})

    return [cell(length) for length in bench.lengths]
