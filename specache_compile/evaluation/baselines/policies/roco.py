"""RoCo (arXiv 2402.06262): the pair with the least mean attention goes, except the b/2 whose attention varies most."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .history import History, newest, protect

# The paper does not say how many queries a deviation needs; the authors' code takes it as infinite for the ten newest.
YOUNG = 10


def importance(history: History, budget: int, random: torch.Generator) -> Tensor:
    """Acc / Count, protecting the r = b/2 pairs of largest sqrt(Acc²/Count - (Acc/Count)²)."""
    count = min(budget // 2, history.token.shape[-1])
    deviation = history.deviation.masked_fill(newest(history, YOUNG), math.inf)
    varied = deviation.argsort(dim=-1, stable=True)[..., history.token.shape[-1] - count :]  # of equals, the newest
    protected = torch.zeros_like(history.token, dtype=torch.bool).scatter_(-1, varied, True)
    return protect(history.mean, protected)
