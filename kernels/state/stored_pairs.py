"""How the pairs of a whole cache are stored, which their dtype tells: as the model made them, as e4m3 codes of the FP8
cache (uint8), or rounded to 8 bits (int8).

A key, and a value, of d channels that is rounded is d codes and the bytes of their scale:

    int8 [..., 2, w]    c_0 ... c_(d-1), what is left of a multiple of four, s in float32
    x_i = s·c_i         s = max |x| / 127
"""

from __future__ import annotations

import torch
from torch import Tensor

from .pages import Pages

FP8 = torch.float8_e4m3fn
ROUNDED, LARGEST = torch.int8, 127
SCALE = torch.float32


def rounds(bits: int, dtype: torch.dtype) -> bool:
    """Whether pairs of this dtype are rounded where so many bits are asked for; those of double precision never are."""
    return bits < 16 and dtype.itemsize <= 4


def rounded_width(head_dim: int) -> int:
    """w: bytes of a rounded key; its scale is aligned."""
    return -(-head_dim // SCALE.itemsize) * SCALE.itemsize + SCALE.itemsize


def stored(pairs: Tensor, target: Tensor | Pages) -> Tensor:
    """Pairs [..., 2, d] as `target` stores them: as they are, or rounded, [..., 2, w]. What is not finite takes its
    whole vector with it."""
    if target.dtype != ROUNDED:
        return pairs
    exact = pairs.float()
    scale = exact.abs().amax(-1, keepdim=True) / LARGEST
    codes = (exact / scale).nan_to_num(0.0).round()
    rows = codes.new_zeros((*pairs.shape[:-1], target.shape[-1]), dtype=ROUNDED)
    rows[..., : pairs.shape[-1]] = codes.to(ROUNDED)
    rows[..., -SCALE.itemsize :] = scale.view(ROUNDED)
    return rows


def decoded(pairs: Tensor, dtype: torch.dtype, head_dim: int) -> Tensor:
    """What stored pairs stand for, [..., head_dim]: in `dtype` where they are codes, else as they are."""
    if pairs.dtype == ROUNDED:
        scale = pairs[..., -SCALE.itemsize :].contiguous().view(SCALE)
        return (pairs[..., :head_dim].float() * scale).to(dtype)
    return pairs.view(FP8).to(dtype) if pairs.dtype == torch.uint8 else pairs
