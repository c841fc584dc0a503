"""Storage formats of a whole cache's pairs, by dtype: the model's, e4m3 codes (uint8), or rounded to 8 bits (int8).

A rounded key or value of d channels has d codes, padding to a multiple of four bytes, and its scale in float32:

    int8 [..., 2, w]    c_0 ... c_(d-1), padding, s          x_i = s·c_i,   s = max |x| / 127
"""

from __future__ import annotations

import torch
from torch import Tensor

from .page_table import Pages

FP8 = torch.float8_e4m3fn
ROUNDED, LARGEST = torch.int8, 127
SCALE = torch.float32


def rounds(bits: int, dtype: torch.dtype) -> bool:
    """Return whether pairs of this dtype are rounded at this number of bits; double precision never is."""
    return bits < 16 and dtype.itemsize <= 4


def rounded_width(head_dim: int) -> int:
    """Return w, the bytes of a rounded key with an aligned scale."""
    return -(-head_dim // SCALE.itemsize) * SCALE.itemsize + SCALE.itemsize


def stored(pairs: Tensor, target: Tensor | Pages) -> Tensor:
    """Return pairs [..., 2, d] in the format of `target`: unchanged, or rounded [..., 2, w].

    An element that is not finite makes its whole vector not finite.
    """
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
    """Decode stored pairs to [..., head_dim] in `dtype`; pairs that are no codes are unchanged."""
    if pairs.dtype == ROUNDED:
        scale = pairs[..., -SCALE.itemsize :].contiguous().view(SCALE)
        return (pairs[..., :head_dim].float() * scale).to(dtype)
    return pairs.view(FP8).to(dtype) if pairs.dtype == torch.uint8 else pairs
