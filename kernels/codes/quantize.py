"""KIVI quantisation with the 1-bit zero point of SpeCache (paper section 3.4, equations 2 to 4).

Keys are quantised per channel over groups of g tokens, values per token over groups of channels. Codes are
packed along the channels in planes: byte j of a token holds the channels j, j + P, j + 2P, ... with
P = head_dim * bits / 8, so that unpacking is a shift and a mask and never an interleave.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .params import read_params, stored_params
from .quantisers import QUANTISERS

# Where quantisation saturates: q·s + z and every step towards it must stay finite in float32.
LARGEST = 2.0**126


def value_group(head_dim: int, group_size: int) -> int:
    """Channels that share a value scale: the largest divisor of `head_dim` that is at most `group_size`."""
    return next(size for size in range(min(head_dim, group_size), 0, -1) if head_dim % size == 0)


def packed_width(head_dim: int, bits: int) -> int:
    """Bytes that hold one token's codes of one head; ValueError where they do not fill whole bytes."""
    if head_dim * bits % 8:
        raise ValueError(f"head_dim {head_dim} does not fill whole bytes at {bits} bits")
    return head_dim * bits // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., d], each below 2**bits → uint8 [..., d * bits / 8], in planes."""
    planes = codes.unflatten(-1, (8 // bits, -1))
    packed = planes[..., 0, :].clone()
    for plane in range(1, 8 // bits):
        packed |= planes[..., plane, :] << (plane * bits)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`: uint8 [..., d * bits / 8] → uint8 codes [..., d]."""
    mask = (1 << bits) - 1
    return torch.cat([(packed >> (plane * bits)) & mask for plane in range(8 // bits)], dim=-1)


def scale_and_zero(
    groups: Tensor, dim: int, bits: int, zero_point: str, there: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scale and zero of each group along `dim` (kept, size 1), in float32.

    zero_point: the name of a quantiser, which says where the levels lie between the group's ends.
    Non-finite elements are left out of min and max: one infinity or NaN must not wipe out its whole group. So is what
    is not `there` (bool, broadcast over `groups`; None: all is): nobody reads it.
    """
    low, high = ends(groups, dim, there)
    return QUANTISERS[zero_point](low.clamp(-LARGEST, LARGEST), high.clamp(-LARGEST, LARGEST), bits)


def ends(groups: Tensor, dim: int, there: Tensor | None) -> tuple[Tensor, Tensor]:
    """The least and the largest finite element of each group that is `there`; both 0 where there is none."""
    if there is None and groups.device.type == "cpu":
        low, high = groups.amin(dim, keepdim=True), groups.amax(dim, keepdim=True)
        if bool((high - low).isfinite().all()):  # NaN and infinities would show: one pass in place of six
            return low, high
    finite = groups.isfinite() if there is None else groups.isfinite() & there
    low = groups.masked_fill(~finite, float("inf")).amin(dim, keepdim=True)
    high = groups.masked_fill(~finite, float("-inf")).amax(dim, keepdim=True)
    empty = low > high
    return low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)


def encode(
    groups: Tensor, dim: int, bits: int, zero_point: str, dtype: torch.dtype, there: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (uint8, the shape of `groups`), scale and zero (as `dtype` stores them, `params.py`; size 1 along `dim`).

    Codes are rounded against the stored scale and zero, so that what `dtype` loses costs no second error.
    +inf and -inf become the group's largest and smallest level, NaN the smallest; a constant group gives its constant,
    with parameters of 8 bits nearly.
    there: as for `scale_and_zero`.
    """
    groups = groups.float()
    scale, zero = stored_params(*scale_and_zero(groups, dim, bits, zero_point, there), dtype)
    step, first = read_params(scale, zero)
    levels = (groups - first).div_(step)  # a scale of 0: not finite, and any code will do
    codes = levels.nan_to_num_(nan=0.0).round_().clamp_(0, (1 << bits) - 1).to(torch.uint8)
    return codes, scale, zero


def quantize_keys(
    keys: Tensor, group_size: int, bits: int, zero_point: str, dtype: torch.dtype, there: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Keys [B, H, T, d] with T a multiple of g → codes [B, H, T, d*bits/8], and scale|zero [B, H, T/g, 2, d] in
    `dtype`.

    there: bool [B, 1, T, 1], which tokens have a part in their group's range.
    """
    groups = keys.unflatten(2, (-1, group_size))
    if there is not None:
        there = there.unflatten(2, (-1, group_size))
    codes, scale, zero = encode(groups, 3, bits, zero_point, dtype, there)
    return pack(codes.flatten(2, 3), bits), torch.cat([scale, zero], dim=3)


def quantize_values(
    values: Tensor, group_size: int, bits: int, zero_point: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Values [B, H, T, d] → codes [B, H, T, d*bits/8], and scale|zero [B, H, T, 2, d/gv] in `dtype`; gv =
    `value_group`."""
    groups = values.unflatten(3, (-1, value_group(values.shape[-1], group_size)))
    codes, scale, zero = encode(groups, 4, bits, zero_point, dtype)
    return pack(codes.flatten(3), bits), torch.stack([scale[..., 0], zero[..., 0]], dim=3)


def dequantize_keys(codes: Tensor, params: Tensor, bits: int) -> Tensor:
    """X' = q·s + z (equation 2) in float32: the inverse of `quantize_keys` up to its rounding; [B, H, T, d]."""
    scale, zero = read_params(*params.unbind(3))
    groups = unpack(codes, bits).unflatten(2, (params.shape[2], -1)).float()
    return (groups * scale.unsqueeze(3) + zero.unsqueeze(3)).flatten(2, 3)


def dequantize_values(codes: Tensor, params: Tensor, bits: int) -> Tensor:
    """X' = q·s + z (equation 2) in float32: the inverse of `quantize_values` up to its rounding; [B, H, T, d]."""
    scale, zero = read_params(*params.unbind(3))
    groups = unpack(codes, bits).unflatten(3, (params.shape[-1], -1)).float()
    return (groups * scale.unsqueeze(4) + zero.unsqueeze(4)).flatten(3)
