"""Names of cases, and the kept logits of a GPU (`kept_logits.py`)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Named:
    """A case whose name is the fields that have no default value."""

    def __str__(self) -> str:
        changed = [f"{name} {value}" for name, value in vars(self).items() if value != getattr(type(self), name)]
        return ", ".join(changed) or "plain"


def bases_of(logits: Tensor, base: Tensor) -> Tensor:
    """Return a view of the bases [B, H, C/64, 2, 4, R'/2], without the log-sum-exp that follows."""
    shape = (*logits.shape[:4], 4, logits.shape[5])
    return base[: math.prod(shape)].view(shape)


def spoil(logits: Tensor, base: Tensor, low_bit: int) -> None:
    """Set the kept logits after the low-bit tier to NaN, and the bases after its last record."""
    token = torch.arange(logits.shape[2] * 64, device=logits.device).view(-1, 1, 8, 1, 8)
    logits.masked_fill_(token >= low_bit, math.nan)
    bases_of(logits, base)[:, :, -(-low_bit // 64) :] = math.nan
