"""How a group's scale s and zero point z are stored, which their dtype tells: as numbers of the pairs' dtype, or in
8 bits each (uint8):

    s   the upper byte of a float16 without its sign: five bits of exponent, three of mantissa; 2^-17 to 57,344
    z   a whole number of eighths of s, signed
"""

from __future__ import annotations

import torch
from torch import Tensor

EIGHT_BITS = torch.uint8
LARGEST_SCALE = 57344.0
# Of a float16's ten bits of mantissa, those that a scale has not.
DROPPED = 7
EIGHTHS = 8
# The most scales that a zero point may be away: a scale that is rounded down still has eighths enough.
FARTHEST = 14.0


def stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A scale in float32, as `dtype` stores it: rounded to the nearest."""
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
    """Scale and zero point in float32, as `dtype` stores them. In 8 bits the scale grows where the zero point is
    farther away than its eighths reach."""
    if dtype != EIGHT_BITS:
        return stored_scale(scale, dtype), zero.clamp(-largest(dtype), largest(dtype)).to(dtype)
    # By a tensor: CUDA multiplies by the reciprocal of a number, which is not always the quotient.
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
