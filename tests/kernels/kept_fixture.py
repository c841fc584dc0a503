"""Cases of the Triton kernels' tests: kept logits of a GPU (`kept_logits.py`) by token, masks, and names."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specache_compile.kernels.attention.kept_logits import LOWEST


class Named:
    """A case whose name is the fields that have no default value."""

    def __str__(self) -> str:
        changed = [f"{name} {value}" for name, value in vars(self).items() if value != getattr(type(self), name)]
        return ", ".join(changed) or "plain"


def random_mask(kind: str, heads: int, lanes: int, tokens: int, dtype: torch.dtype) -> Tensor | None:
    """Return a mask of two rows over `tokens` tokens, [2, Hq|1, lanes|1, tokens]."""
    if kind == "padding":
        return torch.arange(tokens) >= torch.tensor([70, 3]).view(-1, 1, 1, 1)
    if kind == "bool":
        return torch.rand(2, heads, lanes, tokens) > 0.3
    return torch.randn(2, heads, 1, tokens).to(dtype) if kind else None


def bases_of(logits: Tensor, base: Tensor) -> Tensor:
    """Return a view of the bases [B, H, C/64, 2, 4, R'/2], without the log-sum-exp that follows."""
    shape = (*logits.shape[:4], 4, logits.shape[5])
    return base[: math.prod(shape)].view(shape)


def logits_by_token(logits: Tensor, base: Tensor, rows: int) -> Tensor:
    """Return kept logits as float64 [B, H, R, C] in natural units. rows: R."""
    return whole_rows(logits, base)[:, :, :rows] * math.log(2)


def whole_rows(logits: Tensor, base: Tensor) -> Tensor:
    """Return kept logits as float64 [B, H, R', C] in log2 units."""
    offsets = logits.double().permute(0, 1, 5, 3, 2, 4, 6).flatten(4).flatten(2, 3)
    bases = bases_of(logits, base).double().permute(0, 1, 5, 3, 2, 4).flatten(4).flatten(2, 3)
    return offsets + bases.repeat_interleave(16, -1)


def write_kept(x: Tensor, logits: Tensor, base: Tensor) -> None:
    """Write logits float64 [B, H, R, C] in log2 units as the keys' half does; NaN: no token."""
    padded = torch.cat([x, x[:, :, :1]], 2)[:, :, : 2 * logits.shape[5]].unflatten(3, (-1, 4, 16))
    peaks = padded.nan_to_num(nan=-math.inf).amax(-1, keepdim=True).clamp_min(LOWEST)
    above = (padded - peaks).flatten(4).unflatten(4, (8, 8)).unflatten(2, (-1, 2))
    logits.copy_(above.permute(0, 1, 4, 3, 5, 2, 6))
    bases_of(logits, base).copy_(peaks[..., 0].unflatten(2, (-1, 2)).permute(0, 1, 4, 3, 5, 2))


def spoil(logits: Tensor, base: Tensor, low_bit: int) -> None:
    """Set the kept logits after the low-bit tier to NaN, and the bases after its last record."""
    token = torch.arange(logits.shape[2] * 64, device=logits.device).view(-1, 1, 8, 1, 8)
    logits.masked_fill_(token >= low_bit, math.nan)
    bases_of(logits, base)[:, :, -(-low_bit // 64) :] = math.nan
