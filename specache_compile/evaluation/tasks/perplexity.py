"""Perplexity by position over text, each token fed through the cache as a decode step.

A window's last tokens are measured, and those before them are the prefill, whose attention is exact but under an
eviction policy whose `eviction_block` is not "prompt". A text whose next token does not hang on what is far back tells
nothing of a cache: so every row also has what the uncompiled model says of the same tokens behind the last 256 alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from specache_compile.evaluation.runner import Runner, chunks

from .task import Bench, Cell, Outcome

BUCKETS = 8
MOST_STEPS = 128  # more windows tell more than more tokens of one
# What the uncompiled model is given in place of the whole context: so many tokens, and up to a stride of them more,
# for it reads a stride's tokens at once.
RECENT, STRIDE = 256, 64


def prefill_of(length: int) -> int:
    """How many tokens the prefill reads: half, or all but the last 128 that are measured."""
    return max(length // 2, length - MOST_STEPS)


def bucket_means(values: Tensor, prefill: int) -> dict[str, float]:
    """Means over equal stretches of positions: values [rows, steps] -> {first position: mean}."""
    steps = values.shape[1]
    edges = [steps * i // BUCKETS for i in range(BUCKETS + 1)]
    return {
        str(prefill + 1 + start): values[:, start:end].mean().item()
        for start, end in itertools.pairwise(edges)
        if end > start
    }


@dataclass
class Known:
    """A cell's windows, of which the first `begin` tokens begin a text, and what the uncompiled model says of them
    behind their last 256 tokens alone: made on first use, then shared by all methods."""

    rows: Sequence[Sequence[int]]
    begin: int
    made: list[float] = field(default_factory=list)

    def recent(self, runner: Runner) -> list[float]:
        """Mean negative log likelihood of the measured tokens, window by window, in nats."""
        if not self.made:
            with runner.uncompiled():
                for batch in chunks(self.rows, runner.batch_size):
                    self.made += recent_nats(runner, runner.ids(batch), self.begin).mean(1).tolist()
        return self.made


@torch.inference_mode()
def recent_nats(runner: Runner, ids: Tensor, begin: int) -> Tensor:
    """Negative log likelihoods [rows, steps] of a window's measured tokens, ids [rows, n], each behind what begins a
    text and 256 to 319 tokens before it, or as many as there are."""
    first, found = prefill_of(ids.shape[1]) + 1, []
    for start in range(first, ids.shape[1], STRIDE):
        end = min(start + STRIDE, ids.shape[1])
        known = torch.cat([ids[:, :begin], ids[:, max(begin, start - RECENT) : end - 1]], 1)
        logits = runner.model(known, use_cache=False, logits_to_keep=end - start).logits
        found.append(nats_of(logits.float(), ids[:, start:end]))
    return torch.cat(found, 1)


def nats_of(logits: Tensor, wanted: Tensor) -> Tensor:
    """Negative log likelihoods of `wanted` [rows, tokens] under logits [rows, tokens, vocabulary]; [rows, tokens]."""
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view(wanted.shape)


def measure(runner: Runner, known: Known) -> Outcome:
    """exp of the mean negative log likelihood, in nats, of the measured tokens; `nats` and `recent` have the mean of
    each window, with the whole context and with the end of it."""
    prefill, losses = prefill_of(len(known.rows[0])), []
    for batch in chunks(known.rows, runner.batch_size):
        ids = runner.ids(batch)
        losses.append(nats_of(runner.forced_logits(ids, prefill), ids[:, prefill + 1 :].cpu()))
    nats = torch.cat(losses)
    mean = nats.mean().item()
    by_position = {position: math.exp(value) for position, value in bucket_means(nats, prefill).items()}
    detail = {"by_position": by_position, "bits_per_token": mean / math.log(2), "nats": nats.mean(1).tolist(),
              "recent": known.recent(runner)}  # fmt: skip
    return Outcome(math.exp(mean), "perplexity", nats.numel(), detail)


def cells(bench: Bench) -> list[Cell]:
    """One cell a length."""

    def cell(length: int) -> Cell:
        known = Known(bench.windows_apart(length), len(bench.reader.begin()))
        return Cell(str(length), length, lambda runner: measure(runner, known), {"steps": MOST_STEPS})

    return [cell(length) for length in bench.lengths]
