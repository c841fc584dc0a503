"""How close the next tokens' distributions are to the full cache's, on text that is fed token by token.

Every method gets the same windows, so that comparisons are paired.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from specache_compile.errors import SpecacheError
from specache_compile.evaluation.runner import Runner, chunks, shown

from .task import Bench, Cell, Outcome

# Tokens of a continuation, each measured: enough for the fetched pairs to turn over, few beside the prompt.
STEPS = 24


class Windows:
    """The windows of a cell, and the full cache's distributions, made on first use and shared by all methods.

    full: for each batch log-probabilities [rows, STEPS, vocabulary], float16, and the likeliest tokens [rows, STEPS].
        The error in a KL is some 1e-4 nats, the same for every method.
    """

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.rows = rows
        self.full: list[tuple[Tensor, Tensor]] = []

    def forced(self, runner: Runner) -> Iterator[Tensor]:
        """For each batch the logits [rows, STEPS, vocabulary] that predict the windows' last tokens."""
        for batch in shown(chunks(self.rows, runner.batch_size), "batch"):
            yield runner.forced_logits(runner.ids(batch), len(batch[0]) - STEPS - 1)

    def of_full_cache(self, runner: Runner) -> list[tuple[Tensor, Tensor]]:
        if not self.full:
            with runner.uncompiled():
                self.full = [(each.log_softmax(-1).half(), each.argmax(-1)) for each in self.forced(runner)]
        return self.full


def measure(runner: Runner, windows: Windows) -> Outcome:
    """The score is top-1 agreement. `kinds` has KL(full || method) in nats, the agreement, and every window's KL."""
    kl: list[float] = []
    same: list[float] = []
    full = windows.of_full_cache(runner)
    for logits, (logs, best) in zip(windows.forced(runner), full, strict=True):
        kl += divergence(logs.float(), logits).mean(-1).tolist()
        same += (best == logits.argmax(-1)).float().mean(-1).tolist()
    forced: dict[str, Any] = {"kl": statistics.fmean(kl), "agreement": statistics.fmean(same), "each": kl}
    return Outcome(forced["agreement"], "top-1 agreement", len(windows.rows), {"kinds": {"forced": forced}})


def divergence(full: Tensor, ours: Tensor) -> Tensor:
    """KL(full || ours) in nats over the last dimension of logits."""
    log_full, log_ours = full.log_softmax(-1), ours.log_softmax(-1)
    return (log_full.exp() * (log_full - log_ours)).sum(-1)


def cells(bench: Bench) -> list[Cell]:
    """One cell a length, its continuation included."""

    def cell(length: int) -> Cell:
        if length < STEPS + 2:
            raise SpecacheError(
                f"task closeness: a context of {length} tokens is no more than a continuation of {STEPS} and a token"
            )
        windows = Windows(bench.windows_apart(length))
        return Cell(str(length), length, functools.partial(measure, windows=windows), {"steps": STEPS})

    return [cell(length) for length in bench.lengths]
