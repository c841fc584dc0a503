"""What a KV head knows of the pairs that it keeps, and so all that a policy may decide by."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class History:
    """Of each kept pair, [B, H, n], in the order of their tokens; attention is averaged over the query group.

    token int32: its number in the sequence. last: attention of the newest query. total, squares: Σ attention and
    Σ attention² over the queries since it came, its own included (RoCo: Acc, Acc²). above: queries that gave it more
    than the average of what they saw. seen: queries that could see it (RoCo: Count).
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


# (history, budget in pairs, random numbers) → importance [B, H, n]; inf: protected. Of equals the oldest goes. H: the
# KV heads of one layer, which a policy may look at together.
Policy = Callable[[History, int, torch.Generator], Tensor]


def protect(importance: Tensor, protected: Tensor) -> Tensor:
    """The importance, infinite where `protected`."""
    return importance.masked_fill(protected, math.inf)


def newest(history: History, count: int) -> Tensor:
    """Whether a pair is among the `count` newest tokens of the sequence: the local window."""
    return history.token > history.token.amax(-1, keepdim=True) - count
