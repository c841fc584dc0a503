"""How the low-bit tier stores a pair: bits of keys and of values, and whether both are rotated before."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from specache_compile.kernels.codes.quantize import packed_width


class Layout(NamedTuple):
    """Settings of the ops. A token's codes are one row: its keys' bytes, then its values'.

    key_bits: 16, then of values too: the pair as it is, never rotated, in the model's dtype.
    rotate: 1: keys and values are rotated before they are quantised.

    g is no setting: the scales' shapes tell it.
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
        """Elements of a token's codes that are keys, and values: bytes, or channels where nothing is quantised."""
        if not self.is_quantised:
            return head_dim, head_dim
        return packed_width(head_dim, self.key_bits), packed_width(head_dim, self.value_bits)

    def split(self, codes: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """Views of the keys' and the values' part of codes [..., widths' sum]."""
        keys, values = codes.split(self.widths(head_dim), -1)
        return keys, values


def rotation_block(head_dim: int) -> int:
    """Channels that are rotated together: the largest power of two that divides head_dim."""
    return head_dim & -head_dim


@functools.cache
def hadamard(size: int, device: torch.device) -> Tensor:
    """The orthonormal Hadamard matrix [size, size] in Sylvester's order, float32; it is its own inverse."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / size**0.5).to(device)


def rotated(x: Tensor) -> Tensor:
    """x [..., d] times the Hadamard matrix of `rotation_block(d)`, block by block, in float32; done twice, it is x.

    A channel with outliers is spread over all, so that a group's range fits each of its channels; q·k stays as it is
    where both are rotated. What is not finite takes its token's whole block with it.
    """
    block = rotation_block(x.shape[-1])
    return (x.float().unflatten(-1, (-1, block)) @ hadamard(block, x.device)).flatten(-2)
