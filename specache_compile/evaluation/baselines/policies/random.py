"""Random eviction: the floor that RoCo's paper (arXiv 2402.06262) compares with."""

from __future__ import annotations

import torch
from torch import Tensor

from .history import History


def importance(history: History, budget: int, random: torch.Generator) -> Tensor:
    """A fresh number for every pair."""
    return torch.rand(history.token.shape, generator=random, device="cpu").to(history.token.device)
