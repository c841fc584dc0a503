"""Eviction policies: each is a function from the statistics of a KV head's kept pairs to their importance.

The least important pair is evicted. A new policy is a function and a line in POLICIES, which `eviction` registers as a
method.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# The first tokens that StreamingLLM keeps, the sinks of idle attention.
SINKS = 4
# RoCo's paper does not say how many queries a deviation needs; the authors' code takes it as infinite for the ten
# newest.
YOUNG = 10


@dataclass(frozen=True)
class History:
    """Figures [B, H, n] of the kept pairs, in the order of their tokens; attention is averaged over the query group.

    token: int32, the token's number in the sequence.
    last: attention of the newest query.
    total, squares: Σ attention and Σ attention² over the queries from the pair's own on (RoCo: Acc, Acc²).
    above: how many queries gave the pair more than their average over what they saw.
    seen: how many queries could see the pair (RoCo: Count).
    """

    token: Tensor
    last: Tensor
    total: Tensor
    squares: Tensor
    above: Tensor
    seen: Tensor

    @property
    def mean(self) -> Tensor:
        return self.total / self.seen.clamp(min=1)

    @property
    def deviation(self) -> Tensor:
        """Standard deviation of the attention that each pair got (RoCo section 4.3)."""
        return (self.squares / self.seen.clamp(min=1) - self.mean.square()).clamp(min=0).sqrt()


# (history, budget in pairs, random numbers) → importance [B, H, n]; inf: protected. Among equals the oldest goes. A
# policy may look at the H KV heads of a layer together.
Policy = Callable[[History, int, torch.Generator], Tensor]


def newest(history: History, count: int) -> Tensor:
    """Whether a pair is among the `count` newest tokens of the sequence: the local window."""
    return history.token > history.token.amax(-1, keepdim=True) - count


def random(history: History, budget: int, random: torch.Generator) -> Tensor:
    """Random eviction: the floor that RoCo's paper (arXiv 2402.06262) compares with."""
    return torch.rand(history.token.shape, generator=random, device="cpu").to(history.token.device)


def streaming_llm(history: History, budget: int, random: torch.Generator) -> Tensor:
    """StreamingLLM (Xiao et al. 2023): the oldest goes, except the first four tokens, the sinks of idle attention.

    The first token is the first without padding.
    """
    first = history.token.masked_fill(history.seen == 0, torch.iinfo(torch.int32).max).amin(-1, keepdim=True)
    return history.token.float().masked_fill(history.token < first + SINKS, math.inf)


def scissorhands(history: History, budget: int, random: torch.Generator) -> Tensor:
    """Scissorhands (Liu et al. 2023): the pair that is least often above the average goes, outside a local window of
    b/2."""
    return history.above.masked_fill(newest(history, budget // 2), math.inf)


def h2o(history: History, budget: int, random: torch.Generator) -> Tensor:
    """H2O (Zhang et al. 2023): the pair with the least accumulated attention goes, outside a local window of b/2."""
    return history.total.masked_fill(newest(history, budget // 2), math.inf)


def tova(history: History, budget: int, random: torch.Generator) -> Tensor:
    """TOVA (arXiv 2401.06104): all heads of a layer drop the token that the newest query attends to least, by the
    heads' mean."""
    return history.last.mean(1, keepdim=True).expand_as(history.last)


def roco(history: History, budget: int, random: torch.Generator) -> Tensor:
    """RoCo (arXiv 2402.06262): the pair with the least mean attention goes, except the b/2 whose attention varies most.

    The importance is Acc / Count; the r = b/2 pairs of largest sqrt(Acc²/Count - (Acc/Count)²) are protected.
    """
    count = min(budget // 2, history.token.shape[-1])
    deviation = history.deviation.masked_fill(newest(history, YOUNG), math.inf)
    varied = deviation.argsort(dim=-1, stable=True)[..., history.token.shape[-1] - count :]  # of equals, the newest
    protected = torch.zeros_like(history.token, dtype=torch.bool).scatter_(-1, varied, True)
    return history.mean.masked_fill(protected, math.inf)


POLICIES: dict[str, Policy] = {
    policy.__name__: policy for policy in (random, streaming_llm, scissorhands, h2o, tova, roco)
}
