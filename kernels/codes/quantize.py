"""KIVI quantisation with the 1-bit zero point of SpeCache (paper section 3.4, equations 2 to 4).

Keys are quantised per channel over groups of g tokens, values per token over groups of channels. `records.py` packs the
levels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .params import read_params, stored_params

# Quantisation saturates here, so that q·s + z and all intermediate values stay finite in float32.
LARGEST = 2.0**126
# The dimension of keys' groups, and of values'.
TOKENS, CHANNELS = 2, 3
# (low, high, bits) → scale s and zero z in float32. A code q of 0 .. 2**bits - 1 decodes to q·s + z (KIVI, equation 2).
Quantiser = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def minimum(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """z = min, s = (max - min) / (2**bits - 1): minimum and maximum are levels (KIVI)."""
    spread = high - low
    # Divide by a tensor: for a number CUDA multiplies by the reciprocal, which may round differently.
    return spread / spread.new_full((), (1 << bits) - 1), low


def midpoint(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """At 1 bit z = (3·min + max) / 4, s = (max - min) / 2: the midpoints of the two halves (SpeCache, section 3.4)."""
    return ((high - low) / 2, low + (high - low) / 4) if bits == 1 else minimum(low, high, bits)


def middles(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """s = (max - min) / 2**bits, z = min + s / 2: the midpoints of 2**bits equal parts; at 1 bit as `midpoint`."""
    scale = (high - low) / (1 << bits)
    return scale, low + scale / 2


QUANTISERS: dict[str, Quantiser] = {"midpoint": midpoint, "minimum": minimum, "middles": middles}


def ends(groups: Tensor, dim: int, there: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest finite included element of each group; both are 0 if there is none."""
    if there is None and groups.device.type == "cpu":
        low, high = groups.amin(dim, keepdim=True), groups.amax(dim, keepdim=True)
        if bool((high - low).isfinite().all()):  # no NaN or infinity: one pass instead of six
            return low, high
    finite = groups.isfinite() if there is None else groups.isfinite() & there
    low = groups.masked_fill(~finite, float("inf")).amin(dim, keepdim=True)
    high = groups.masked_fill(~finite, float("-inf")).amax(dim, keepdim=True)
    empty = low > high
    return low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)


def encode(
    groups: Tensor, dim: int, bits: int, zero_point: str, dtype: torch.dtype, there: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (uint8, the shape of `groups`), scale and zero (stored as `dtype`, `params.py`; size 1 along `dim`).

    Codes are rounded with the stored scale and zero, so that rounding these adds no second error. +inf and -inf become
    the group's largest and smallest level, NaN the smallest. A constant group decodes to its constant; with 8-bit
    parameters, approximately.

    there: bool, broadcast over `groups`, False for elements to exclude; None to include all. Elements that are not
        finite, which would destroy their whole group, are excluded too.
    """
    groups = groups.float()
    low, high = (end.clamp(-LARGEST, LARGEST) for end in ends(groups, dim, there))
    scale, zero = stored_params(*QUANTISERS[zero_point](low, high, bits), dtype)
    step, first = read_params(scale, zero)
    levels = (groups - first).div_(step)  # not finite at scale 0, where any code is correct
    codes = levels.nan_to_num_(nan=0.0).round_().clamp_(0, (1 << bits) - 1).to(torch.uint8)
    return codes, scale, zero


def quantize(
    x: Tensor, dim: int, size: int, bits: int, zero_point: str, dtype: torch.dtype, there: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise keys or values [B, H, T, d] over groups of `size` along `dim`, which they divide.

    dim: `TOKENS` for keys, `CHANNELS` for values.
    there: bool [B, 1, T, 1], False for tokens that do not count in their group's range.

    Returns: levels uint8 [B, H, T, d], and scale|zero in `dtype`, of keys [B, H, T/g, 2, d], of values
    [B, H, T, 2, d/gv].
    """
    groups = x.unflatten(dim, (-1, size))
    present = None if there is None else there.unflatten(dim, (-1, size))
    levels, *params = encode(groups, dim + 1, bits, zero_point, dtype, present)
    return levels.flatten(dim, dim + 1), torch.stack([param.squeeze(dim + 1) for param in params], 3)


def dequantize(levels: Tensor, params: Tensor, dim: int) -> Tensor:
    """Return X' = q·s + z (equation 2) in float32 [B, H, T, d]: the inverse of `quantize` up to rounding."""
    scale, zero = (param.unsqueeze(dim + 1) for param in read_params(*params.unbind(3)))
    return (levels.unflatten(dim, (scale.shape[dim], -1)).float() * scale + zero).flatten(dim, dim + 1)
