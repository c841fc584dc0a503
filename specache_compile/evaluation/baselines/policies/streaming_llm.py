"""StreamingLLM (Xiao et al. 2023): the oldest goes, except the first four tokens, the sinks of idle attention."""

from __future__ import annotations

import torch
from torch import Tensor

from .history import History, protect

SINKS = 4


def importance(history: History, budget: int, random: torch.Generator) -> Tensor:
    """A token's number; sinks are protected. The first token is the first without padding."""
    first = history.token.masked_fill(history.seen == 0, torch.iinfo(torch.int32).max).amin(-1, keepdim=True)
    return protect(history.token.float(), history.token < first + SINKS)
