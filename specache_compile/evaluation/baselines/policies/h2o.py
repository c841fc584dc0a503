"""H2O (Zhang et al. 2023): the pair with the least accumulated attention goes, outside a local window of b/2."""

from __future__ import annotations

import torch
from torch import Tensor

from .history import History, newest, protect


def importance(history: History, budget: int, random: torch.Generator) -> Tensor:
    """Acc = Σ attention received."""
    return protect(history.total, newest(history, budget // 2))
