"""Scissorhands (Liu et al. 2023): the pair that is least often above the average goes, outside a local window of
b/2."""

from __future__ import annotations

import torch
from torch import Tensor

from .history import History, newest, protect


def importance(history: History, budget: int, random: torch.Generator) -> Tensor:
    """The number of steps in which a pair got more than the average attention."""
    return protect(history.above, newest(history, budget // 2))
