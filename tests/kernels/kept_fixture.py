"""Kept logits of a GPU (`kept_logits.py`) by token."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def bases_of(logits: Tensor, base: Tensor) -> Tensor:
    """Return a view of the bases [B, H, C/64, 2, 4, R'/2], without the log-sum-exp that follows."""
    shape = (*logits.shape[:4], 4, logits.shape[5])
    return base[: math.prod(shape)].view(shape)


def logits_by_token(logits: Tensor, base: Tensor, rows: int) -> Tensor:
    """Return kept logits as float64 [B, H, R, C] in natural units. rows: R."""
    offsets = logits.double().permute(0, 1, 5, 3, 2, 4, 6).flatten(4).flatten(2, 3)
    bases = bases_of(logits, base).double().permute(0, 1, 5, 3, 2, 4).flatten(4).flatten(2, 3)
    return (offsets + bases.repeat_interleave(16, -1))[:, :, :rows] * math.log(2)


def spoil(logits: Tensor, base: Tensor, low_bit: int) -> None:
    """Set the kept logits after the low-bit tier to NaN, and the bases after its last record."""
    token = torch.arange(logits.shape[2] * 64, device=logits.device).view(-1, 1, 8, 1, 8)
    logits.masked_fill_(token >= low_bit, math.nan)
    bases_of(logits, base)[:, :, -(-low_bit // 64) :] = math.nan
