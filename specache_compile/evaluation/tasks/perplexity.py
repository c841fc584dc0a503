"""Perplexity by position over text, each token fed through the cache as a decode step.

A window's last tokens are measured; the tokens before them are the prefill. Its attention is exact, except under an
eviction policy whose `eviction_block` is not "prompt". A text whose next token does not depend on distant ones is no
evidence about a cache, so the uncompiled model is also measured with the last 256 tokens alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specache_compile.compile.compiled_options import options_of
from specache_compile.evaluation.runner import Runner, chunks, shown

from .task import Bench, Cell, Outcome

BUCKETS = 8
MOST_STEPS = 128  # more windows are better than longer ones
# Without the whole context the uncompiled model gets so many tokens, and up to a stride more: it reads a stride at
# once.
RECENT, STRIDE = 256, 64


def prefill_of(length: int) -> int:
    """How many tokens the prefill reads: half, or all but the last 128, of which the first is given."""
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


@torch.inference_mode()
def recent_nats(model: Any, ids: Tensor, begin: int) -> Tensor:
    """Negative log likelihoods [rows, steps] of the measured tokens of windows ids [rows, n].

    Each token is behind the `begin` tokens that begin a text and the 256 to 319 tokens before it, or as many as there
    are.
    """
    first, found = prefill_of(ids.shape[1]) + 1, []
    for start in range(first, ids.shape[1], STRIDE):
        end = min(start + STRIDE, ids.shape[1])
        context = torch.cat([ids[:, :begin], ids[:, max(begin, start - RECENT) : end - 1]], 1)
        logits = model(context, use_cache=False, logits_to_keep=end - start).logits
        found.append(nats_of(logits.float(), ids[:, start:end]))
    return torch.cat(found, 1)


def nats_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log likelihoods of `targets` [rows, tokens] under logits [rows, tokens, vocabulary]; [rows, tokens]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


def measure(runner: Runner, rows: Sequence[Sequence[int]], begin: int = 0) -> Outcome:
    """exp of the mean negative log likelihood of the measured tokens.

    nats: each window's mean.
    recent: the same behind the last 256 tokens alone, for the uncompiled model.
    begin: tokens at the start of each window that begin a text.
    """
    prefill, losses, recent = prefill_of(len(rows[0])), [], []
    for batch in shown(chunks(rows, runner.batch_size), "batch"):
        ids = runner.ids(batch)
        losses.append(nats_of(runner.forced_logits(ids, prefill), ids[:, prefill + 1 :].cpu()))
        if options_of(runner.model) is None:
            recent += recent_nats(runner.model, ids, begin).mean(1).tolist()
    nats = torch.cat(losses)
    mean = nats.mean().item()
    by_position = {position: math.exp(value) for position, value in bucket_means(nats, prefill).items()}
    detail = {"by_position": by_position, "bits_per_token": mean / math.log(2), "nats": nats.mean(1).tolist()}
    if recent:
        detail["recent"] = recent
    return Outcome(math.exp(mean), "perplexity", nats.numel(), detail)


def cells(bench: Bench) -> list[Cell]:
    """One cell a length."""
    begin = len(bench.reader.begin())

    def cell(length: int) -> Cell:
        rows = bench.windows_apart(length)
        return Cell(str(length), length, lambda runner: measure(runner, rows, begin), {"steps": MOST_STEPS})

    return [cell(length) for length in bench.lengths]
