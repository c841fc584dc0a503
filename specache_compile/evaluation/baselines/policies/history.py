"""The statistics of a KV head's kept pairs, the input of a policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


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


def protect(importance: Tensor, protected: Tensor) -> Tensor:
    """The importance, infinite where `protected`."""
    return importance.masked_fill(protected, math.inf)


def newest(history: History, count: int) -> Tensor:
    """Whether a pair is among the `count` newest tokens of the sequence: the local window."""
    return history.token > history.token.amax(-1, keepdim=True) - count
