"""Storage formats of a group's scale s and zero point z, by dtype: the pairs' dtype, or 8 bits each (uint8):

s   the upper byte of a float16 without its sign: five bits of exponent, three of mantissa; 2^-17 to 57,344
z   a signed integer, in units of s / 8
"""

from __future__ import annotations

import torch
from torch import Tensor

EIGHT_BITS = torch.uint8
LARGEST_SCALE = 57344.0
# Number of a float16's ten mantissa bits that a scale drops.
DROPPED = 7
EIGHTHS = 8
# The largest zero point in units of the scale, with a margin for scales that are rounded down.
FARTHEST = 14.0


def stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a float32 scale to the nearest stored scale of `dtype`."""
    if dtype != EIGHT_BITS:
        return scale.clamp(max=largest(dtype)).to(dtype)
    halves = scale.clamp(max=LARGEST_SCALE).to(torch.float16).view(torch.int16)
    return (halves + (1 << DROPPED - 1) >> DROPPED).to(EIGHT_BITS)


def read_scale(scale: Tensor) -> Tensor:
    """What is stored so, in float32."""
    if scale.dtype != EIGHT_BITS:
        return scale.float()
    return (scale.to(torch.int16) << DROPPED).view(torch.float16).float()


def stored_params(scale: Tensor, zero: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round float32 scale and zero point to stored parameters of `dtype`.

    In 8 bits, the scale grows if the zero point exceeds the range of its eighths.
    """
    if dtype != EIGHT_BITS:
        return stored_scale(scale, dtype), zero.clamp(-largest(dtype), largest(dtype)).to(dtype)
    # Divide by a tensor: for a number CUDA multiplies by the reciprocal, which may round differently.
    scale = stored_scale(torch.maximum(scale, zero.abs() / zero.new_full((), FARTHEST)), dtype)
    eighths = (zero / read_scale(scale) * EIGHTHS).nan_to_num(0.0).round().clamp(-128, 127)
    return scale, eighths.to(torch.int8).view(dtype)


def read_params(scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """What is stored so, in float32."""
    if scale.dtype != EIGHT_BITS:
        return scale.float(), zero.float()
    found = read_scale(scale)
    return found, zero.view(torch.int8).float() / EIGHTHS * found


def largest(dtype: torch.dtype) -> float:
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
