"""The state tensors that `append` writes, and the low-bit tier's storage of a pair: bits, and rotation."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from specache_compile.kernels.codes.records import stored_dim

# Entry of slot_index and sink_index without a token.
EMPTY = -1


class Layout(NamedTuple):
    """Settings of the ops. `records.py` has the order of codes; unquantised pairs are rows, key first.

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

    def width(self, head_dim: int) -> int:
        """Return w, the elements of a token's codes: bytes, or channels if not quantised."""
        if not self.is_quantised:
            return 2 * head_dim
        return stored_dim(head_dim) * (self.key_bits + self.value_bits) // 8


class StoredTiers(NamedTuple):
    """The operand `tiers` of attention ops: the state tensors in a fixed order.

    The slots are not included, since an op that takes them must wait for their fetch.

    codes: [B, H, C, w] in the op's `Layout`.
    key_params: [B, H, C/g, 2, d], scale and zero point of each group of keys (formats in `params.py`).
        In the trellis code: [B, H, C/g, 1, g], the scale of each key.
    value_params: [B, H, C, 2, d/gv], scale and zero point of each group of values.
        In the trellis code: [B, H, C, 1, 1], the scale of each value.
    center: [B, H, 4, d], or a stepped center [B, H, 3, d] (`center.py`), or no center [B, H, 0, d].
    sink_pairs: [B, H, S, 2, d], the pairs of sink tokens (`sinks.py`).
    sink_index: int32 [B, 1, S], the sink tokens; -1: none.
    recent: [B, H, W, 2, d], the window.
    """

    codes: Tensor
    key_params: Tensor
    value_params: Tensor
    center: Tensor
    sink_pairs: Tensor
    sink_index: Tensor
    recent: Tensor


def rotation_block(head_dim: int) -> int:
    """Return the number of channels that are rotated together: the largest power of two that divides head_dim."""
    return head_dim & -head_dim


@functools.cache
def hadamard(size: int, device: torch.device) -> Tensor:
    """Return the Hadamard matrix [size, size] of ±1 in Sylvester's order, float32."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix.to(device)


def rotated(x: Tensor) -> Tensor:
    """Multiply x [..., d] by the Hadamard matrix of `rotation_block(d)`, block by block, in float32; its own inverse.

    Rotation spreads a channel's outliers over all channels, so that channels have similar ranges. It preserves q·k.
    An element that is not finite makes its token's whole block not finite.
    """
    block = rotation_block(x.shape[-1])
    # The norm is apart from the matrix: ±1 is exact in TF32.
    return ((x.float().unflatten(-1, (-1, block)) @ hadamard(block, x.device)) * block**-0.5).flatten(-2)
