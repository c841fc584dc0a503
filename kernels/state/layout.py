"""The low-bit tier's storage of a pair: bits of keys and values, and rotation."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from specache_compile.kernels.codes.quantize import packed_width


class Layout(NamedTuple):
    """Settings of the ops. A token's codes are one row: the bytes of its key, then of its value.

    key_bits, value_bits: bits per number. Both are 16 for unquantised, unrotated pairs in the model's dtype.
    rotate: 1 if keys and values are rotated before quantisation.

    The group size g follows from the scales' shapes.
    """

    key_bits: int
    value_bits: int
    rotate: int

    @property
    def is_quantised(self) -> bool:
        return self.key_bits < 16

    @property
    def is_rotated(self) -> bool:
        return bool(self.rotate) and self.is_quantised

    def widths(self, head_dim: int) -> tuple[int, int]:
        """Return the numbers of elements in a token's key and value codes: bytes, or channels if not quantised."""
        if not self.is_quantised:
            return head_dim, head_dim
        return packed_width(head_dim, self.key_bits), packed_width(head_dim, self.value_bits)

    def split(self, codes: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """Return views of the key and value parts of codes [..., sum of widths]."""
        keys, values = codes.split(self.widths(head_dim), -1)
        return keys, values


def rotation_block(head_dim: int) -> int:
    """Return the number of channels that are rotated together: the largest power of two that divides head_dim."""
    return head_dim & -head_dim


@functools.cache
def hadamard(size: int, device: torch.device) -> Tensor:
    """Return the orthonormal Hadamard matrix [size, size] in Sylvester's order, float32; it is its own inverse."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / size**0.5).to(device)


def rotated(x: Tensor) -> Tensor:
    """Multiply x [..., d] by the Hadamard matrix of `rotation_block(d)`, block by block, in float32; its own inverse.

    Rotation spreads a channel's outliers over all channels, so that channels have similar ranges. It preserves q·k.
    An element that is not finite makes its token's whole block not finite.
    """
    block = rotation_block(x.shape[-1])
    return (x.float().unflatten(-1, (-1, block)) @ hadamard(block, x.device)).flatten(-2)
