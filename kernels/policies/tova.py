"""TOVA (Oren et al. 2024): the pair that the newest query attends to least goes."""

from __future__ import annotations

import torch
from torch import Tensor

from .history import History


def importance(history: History, budget: int, random: torch.Generator) -> Tensor:
    """The newest query's attention."""
    return history.last
