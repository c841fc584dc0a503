"""TOVA (arXiv 2401.06104): the token that the newest query attends to least goes, by the mean over a layer's heads,
which all drop the same."""

from __future__ import annotations

import torch
from torch import Tensor

from .history import History


def importance(history: History, budget: int, random: torch.Generator) -> Tensor:
    """The newest query's attention, averaged over all query heads of the layer."""
    return history.last.mean(1, keepdim=True).expand_as(history.last)
