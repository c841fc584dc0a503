"""A method's own text over thousands of tokens, where errors feed on themselves, and the distance of each token's
distribution from the full cache's behind the same text.

Every method samples with the same Gumbel noise of the row and the position, so methods that agree write the same text.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from specache_compile.errors import SpecacheError
from specache_compile.evaluation.intervals import interval
from specache_compile.evaluation.runner import Runner, as_list, chunks, decode, read, shown

from .closeness import divergence
from .task import Bench, Cell, Outcome

# Tokens of text before a continuation: read exactly, and few beside its own.
PROMPT = 128
# Own tokens that the full cache reads at once.
STRIDE = 64
BUCKETS = 8


def sampled(logits: Tensor, first: int, place: int, seed: int) -> Tensor:
    """The next tokens [rows, 1] at temperature 1 for logits [rows, vocabulary], with the noise of `seed`, the row and
    the place. first: the number of the first row."""
    rows = []
    for row in range(first, first + len(logits)):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + row) * 1_000_003 + place)
        rows.append(torch.rand(logits.shape[1], generator=generator))
    gumbel = torch.stack(rows).clamp_(min=1e-12).log_().neg_().log_().neg_()
    return (logits + gumbel).argmax(-1, keepdim=True)


def own_text(runner: Runner, ids: Tensor, tokens: int, seed: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """The method's tokens [rows, tokens] behind `ids` [rows, PROMPT], and KL(full || method) of each; first: the number
    of the first row."""
    cache, logits = runner.read(ids)
    with runner.uncompiled():
        full_cache, full = read(runner.model, ids)
    generated: list[Tensor] = []
    kl: list[Tensor] = []
    for places in shown(chunks(range(tokens), STRIDE), "stride"):
        ours, drawn = [], []
        for place in places:
            ours.append(logits)
            drawn.append(sampled(logits[:, -1], first, place, seed).to(ids.device))
            if place + 1 < tokens:
                logits = decode(runner.model, cache, drawn[-1])
        generated.append(torch.cat(drawn, 1))
        with runner.uncompiled():
            behind = decode(runner.model, full_cache, generated[-1], at_once=STRIDE)
        pairs = zip(torch.cat([full, behind[:, :-1]], 1), torch.cat(ours, 1), strict=True)
        kl.append(torch.stack([divergence(*pair) for pair in pairs]))  # a row at a time: these are large
        full = behind[:, -1:]
    return torch.cat(generated, 1).cpu(), torch.cat(kl, 1)


def measure(runner: Runner, rows: Sequence[Sequence[int]], tokens: int, seed: int) -> Outcome:
    """The score is the mean KL up to each text's end.

    each: a text's KL, length and tokens.
    by_position: the mean KL of each stretch of positions.
    intervals: their 95 % intervals over texts.
    """
    texts: list[list[int]] = []
    kls: list[list[float]] = []
    ends = set(as_list(runner.model.generation_config.eos_token_id))
    for batch in chunks(rows, runner.batch_size):
        generated, kl = own_text(runner, runner.ids(batch), tokens, seed, first=len(texts))
        for text, distances in zip(generated.tolist(), kl.tolist(), strict=True):
            length = next((place + 1 for place, token in enumerate(text) if token in ends), len(text))
            texts.append(text[:length])
            kls.append(distances[:length])
    each: list[dict[str, Any]] = [
        {"kl": statistics.fmean(kl), "length": len(text), "tokens": text} for text, kl in zip(texts, kls, strict=True)
    ]
    stretches = dict(by_stretch(kls, tokens))
    detail = {
        "each": each,
        "by_position": {place: statistics.fmean(means) for place, means in stretches.items()},
        "intervals": {place: interval(means) for place, means in stretches.items()},
    }
    return Outcome(statistics.fmean(one["kl"] for one in each), "KL to the full cache, nats", len(each), detail)


def by_stretch(kls: Sequence[Sequence[float]], tokens: int) -> Iterator[tuple[str, list[float]]]:
    """Each stretch's first position, and the mean KL there of each text that reaches it."""
    for number in range(BUCKETS):
        start, stop = (tokens * edge // BUCKETS for edge in (number, number + 1))
        means = [statistics.fmean(kl[start:stop]) for kl in kls if kl[start:stop]]
        if means:
            yield str(start), means


def cell(bench: Bench, length: int) -> Cell:
    """The method generates all tokens after the prompt."""
    if length <= PROMPT:
        raise SpecacheError(f"task long: {length} tokens are too few. Pass --lengths above {PROMPT}")
    prompts = bench.windows_apart(PROMPT)
    work = functools.partial(measure, rows=prompts, tokens=length - PROMPT, seed=bench.seed)
    return Cell(f"{length} sampled", length, work, {"prompt": PROMPT})
