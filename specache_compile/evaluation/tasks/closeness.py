"""How close the next tokens' distributions are to the full cache's: on forced text, greedy tokens and sampled ones.

Greedy tokens are easier to predict than sampled ones, and forced text is the hardest, so the three are measured
separately. Every method gets the same tokens after the same prompts: comparisons are paired.
"""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specache_compile.errors import SpecacheError
from specache_compile.evaluation.runner import Runner, decode

from .task import Bench, Cell, Outcome

KINDS = ("forced", "greedy", "sampled")
# Tokens of a continuation, each measured: enough for the fetched pairs to turn over, few beside the prompt.
STEPS = 24


@dataclass(frozen=True)
class Continuation:
    """The full cache's, of a batch's prompts.

    tokens: [rows, STEPS].
    logs: log-probabilities [rows, STEPS, vocabulary], float16. The error in a KL is some 1e-4 nats, the same for every
        method.
    best: the likeliest tokens [rows, STEPS].
    """

    tokens: Tensor
    logs: Tensor
    best: Tensor


class Continuations:
    """Prompts of a cell and their continuations by kind, made on first use and shared by all methods."""

    def __init__(self, rows: Sequence[Sequence[int]], seed: int) -> None:
        self.rows, self.seed = rows, seed
        self.made: list[dict[str, Continuation]] = []

    def of(self, runner: Runner) -> list[dict[str, Continuation]]:
        """By batch, in the order of `runner.batches(rows)`."""
        if not self.made:
            with runner.uncompiled():
                for number, batch in enumerate(runner.batches(self.rows)):
                    self.made.append(self.full(runner, runner.ids(batch), number))
        return self.made

    def full(self, runner: Runner, ids: Tensor, number: int) -> dict[str, Continuation]:
        generator = torch.Generator().manual_seed(self.seed * 1_000 + number)
        prompt, text = ids[:, :-STEPS], ids[:, -STEPS:]
        cache, _ = runner.read(prompt[:, :-1])

        def sample(logits: Tensor) -> Tensor:
            return torch.multinomial(logits.softmax(-1), 1, generator=generator)

        choose = {"greedy": lambda logits: logits.argmax(-1, keepdim=True), "sampled": sample}
        found = {"forced": (text, forced(runner.model, cache, prompt[:, -1:], text))}
        for kind in choose:
            found[kind] = continued(runner.model, cache, prompt[:, -1:], choose[kind])
        return {
            kind: Continuation(tokens, logits.log_softmax(-1).half(), logits.argmax(-1))
            for kind, (tokens, logits) in found.items()
        }


def forced(model: Any, cache: Any, last: Tensor, tokens: Tensor) -> Tensor:
    """The logits [rows, STEPS, vocabulary] that predict `tokens` [rows, STEPS], behind a copy of the cache and the
    prompt's last token [rows, 1]."""
    return decode(model, copy.deepcopy(cache), torch.cat([last, tokens[:, :-1]], 1))


def continued(model: Any, cache: Any, last: Tensor, choose: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """As `forced`, of the tokens that `choose` takes of logits [rows, vocabulary]: these tokens, and all logits."""
    cache, tokens, logits = copy.deepcopy(cache), [last], []
    for _ in range(STEPS):
        logits.append(decode(model, cache, tokens[-1]))
        tokens.append(choose(logits[-1][:, -1]).to(last.device))
    return torch.cat(tokens[1:], 1), torch.cat(logits, 1)


def measure(runner: Runner, known: Continuations) -> Outcome:
    """The score is top-1 agreement on forced text. For each kind `kinds` has KL(full || method) in nats, the
    agreement, and the KL of every window."""
    kl: dict[str, list[float]] = {kind: [] for kind in KINDS}
    same: dict[str, list[float]] = {kind: [] for kind in KINDS}
    continuations = known.of(runner)
    for batch, full in zip(runner.batches(known.rows), continuations, strict=True):
        prompt = runner.ids(batch)[:, :-STEPS]
        cache, _ = runner.read(prompt[:, :-1])
        for kind in KINDS:
            logits = forced(runner.model, cache, prompt[:, -1:], full[kind].tokens)
            kl[kind] += divergence(full[kind].logs.float(), logits).mean(-1).tolist()
            same[kind] += (full[kind].best == logits.argmax(-1)).float().mean(-1).tolist()
    kinds: dict[str, dict[str, Any]] = {
        kind: {"kl": statistics.fmean(kl[kind]), "agreement": statistics.fmean(same[kind]), "each": kl[kind]}
        for kind in KINDS
    }
    return Outcome(kinds["forced"]["agreement"], "top-1 agreement", len(known.rows), {"kinds": kinds})


def divergence(full: Tensor, ours: Tensor) -> Tensor:
    """KL(full || ours) in nats over the last dimension of logits."""
    log_full, log_ours = full.log_softmax(-1), ours.log_softmax(-1)
    return (log_full.exp() * (log_full - log_ours)).sum(-1)


def cell(bench: Bench, length: int) -> Cell:
    """`length` includes the continuation."""
    if length < STEPS + 2:
        raise SpecacheError(f"task closeness: {length} tokens are too few. Pass --lengths of {STEPS + 2} or more")
    known = Continuations(bench.windows_apart(length), bench.seed)
    return Cell(str(length), length, functools.partial(measure, known=known), {"steps": STEPS})
