"""Storage formats of a whole cache's pairs, by dtype: the model's, e4m3 codes (uint8), or rounded to 8 bits (int8).

A rounded key or value of d channels has d codes, padding to a multiple of four bytes, and its scale in float32:

    int8 [..., 2, w]    c_0 ... c_(d-1), padding, s          x_i = s·c_i,   s = max |x| / 127

A block of a rounded tier, such as a head's part of a page, has the scales of its n tokens behind their codes. So the
codes of a pair are contiguous and aligned: 256 bytes at d = 128.

    int8 [n, 2, w - 4], then float32 [n, 2]
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
ROUNDED, LARGEST = torch.int8, 127
SCALE = torch.float32


def rounds(bits: int, dtype: torch.dtype) -> bool:
    """Return whether pairs of this dtype are rounded at this number of bits; double precision never is."""
    return bits < 16 and dtype.itemsize <= 4


def rounded_width(head_dim: int) -> int:
    """Return w, the bytes of a rounded key with an aligned scale."""
    return -(-head_dim // SCALE.itemsize) * SCALE.itemsize + SCALE.itemsize


def parts_of(blocks: Tensor) -> tuple[Tensor, ...]:
    """Return views of blocks [..., n, 2, d or w], which have a contiguous row for each token.

    They are the pairs, or the codes [..., n, 2, w - 4] and the scales' bytes [..., n, 2, 4].
    """
    if blocks.dtype != ROUNDED:
        return (blocks,)
    *several, tokens, both, width = blocks.shape
    edge = tokens * both * (width - SCALE.itemsize)
    codes, scales = blocks.view(*several, -1).tensor_split([edge], -1)
    return codes.unflatten(-1, (tokens, both, -1)), scales.unflatten(-1, (tokens, both, SCALE.itemsize))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return pairs [..., 2, d or w] from their parts, as a view of a single part."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts], -1)


def write(pairs: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy pairs [..., 2, d or w] to these parts."""
    for part, piece in zip(parts, pairs.split([part.shape[-1] for part in parts], -1), strict=True):
        part.copy_(piece)


def stored(pairs: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """Return pairs [..., 2, d] in a tier's format: unchanged, or rounded [..., 2, width].

    An element that is not finite makes its whole vector not finite.
    """
    if dtype != ROUNDED:
        return pairs
    exact = pairs.float()
    scale = exact.abs().amax(-1, keepdim=True) / LARGEST
    codes = (exact / scale).nan_to_num(0.0).round()
    rows = codes.new_zeros((*pairs.shape[:-1], width), dtype=ROUNDED)
    rows[..., : pairs.shape[-1]] = codes.to(ROUNDED)
    rows[..., -SCALE.itemsize :] = scale.view(ROUNDED)
    return rows


def decoded(pairs: Tensor, dtype: torch.dtype, head_dim: int) -> Tensor:
    """Decode stored pairs to [..., head_dim] in `dtype`; pairs that are no codes are unchanged."""
    if pairs.dtype == ROUNDED:
        scale = pairs[..., -SCALE.itemsize :].contiguous().view(SCALE)
        return (pairs[..., :head_dim].float() * scale).to(dtype)
    if pairs.dtype != torch.uint8:
        return pairs
    if pairs.device.type != "cpu":
        return pairs.view(FP8).to(dtype)
    return values_of_fp8(dtype).index_select(0, pairs.flatten().int()).view(pairs.shape)


@functools.cache
def values_of_fp8(dtype: torch.dtype) -> Tensor:
    """Return the values [256] of the e4m3 codes. A CPU takes four times as long to convert as to look up."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(FP8).to(dtype)
