"""TOVA (arXiv 2401.06104): all heads of a layer drop the token that the newest query attends to least, by the heads'
mean."""

from __future__ import annotations

import torch
from torch import Tensor

from .history import History


def importance(history: History, budget: int, random: torch.Generator) -> Tensor:
    """The newest query's attention, averaged over all query heads of the layer."""
    return history.last.mean(1, keepdim=True).expand_as(history.last)
