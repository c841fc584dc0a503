"""Triton: `layout.rotated`, rows times the Hadamard matrix, in registers.

The matrix is never stored: log2(n) rounds compute sums and differences. A round moves the lowest bit of a channel's
index to the top; after the last round all bits are back in place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import rotation_block

ROW_BLOCK = 16


@triton.jit
def hadamard(x):
    """Multiply float32 [A, n], n a power of two, by the orthonormal Hadamard matrix. FLOPs: A·n·log2(n)."""
    size: tl.constexpr = x.shape[1]
    half: tl.constexpr = size // 2
    norm: tl.constexpr = size**-0.5
    for step in tl.static_range(1, 11):
        if size >> step > 0:
            one, other = tl.split(tl.reshape(x, [x.shape[0], half, 2]))
            x = tl.reshape(tl.permute(tl.join(one + other, one - other), (0, 2, 1)), [x.shape[0], size])
    return x * norm


@triton.jit(do_not_specialize=["count"])
def rotate_rows(
    # x [B, H, rows, d] with contiguous channels; written: out, like x but contiguous.
    x, out,
    # Strides of x in elements; H; B·H·rows.
    x_batch, x_head, x_row, heads, count,
    rows: tl.constexpr, d: tl.constexpr, block: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: `block` channels of ROWS rows. Per row 2·d bytes read, 2·d written, and d·log2(block) FLOPs."""
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = (tl.program_id(1) * block + tl.arange(0, block))[None, :]
    there = (number < count)[:, None]
    row = number // (rows * heads) * x_batch + number // rows % heads * x_head + number % rows * x_row
    turned = hadamard(tl.load(x + row[:, None] + channel, there, 0.0).to(tl.float32))
    tl.store(out + number[:, None] * d + channel, turned.to(out.dtype.element_ty), there)


def rotated(x: Tensor) -> Tensor:
    """Compute `layout.rotated` of x [B, H, rows, d] with contiguous channels; returns a contiguous tensor like x."""
    batch, heads, rows, d = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count, block = batch * heads * rows, rotation_block(d)
    rotate_rows[triton.cdiv(count, ROW_BLOCK), d // block](
        x, out, x_batch=x.stride(0), x_head=x.stride(1), x_row=x.stride(2), heads=heads, count=count,
        rows=rows, d=d, block=block, ROWS=ROW_BLOCK, num_warps=4,
    )  # fmt: skip
    return out
