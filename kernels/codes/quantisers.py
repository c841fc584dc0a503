"""Quantisers by name: functions from a group's minimum and maximum to its levels.

A new quantiser is a function here and a line in QUANTISERS; on CUDA also a branch of `scale_and_zero` in
triton_levels.py.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

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
