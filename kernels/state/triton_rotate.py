"""Triton: rows times the Hadamard matrix, as `layout.rotated` has it, in registers.

Nothing is held or sent for the matrix: log2(n) rounds of sums and differences, all of one shape. A round takes the
lowest bit of a channel's number and puts it on top; after the last one all bits are where they were.
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
    """float32 [A, n], n a power of two, times the orthonormal Hadamard matrix. FLOPs: A·n·log2(n)."""
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
    # x [B, H, rows, d], the channels side by side; written: out, as x but contiguous.
    x, out,
    # Strides of x, in elements; H, and B·H·rows.
    x_batch, x_head, x_row, heads, count,
    rows: tl.constexpr, d: tl.constexpr, block: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: `block` channels of ROWS rows. Bytes a row: 2·d read, 2·d written. FLOPs: d·log2(block)."""
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = (tl.program_id(1) * block + tl.arange(0, block))[None, :]
    there = (number < count)[:, None]
    row = number // (rows * heads) * x_batch + number // rows % heads * x_head + number % rows * x_row
    turned = hadamard(tl.load(x + row[:, None] + channel, there, 0.0).to(tl.float32))
    tl.store(out + number[:, None] * d + channel, turned.to(out.dtype.element_ty), there)


def rotated(x: Tensor) -> Tensor:
    """x [B, H, rows, d], the channels side by side, as `layout.rotated` turns it, contiguous and in x's dtype."""
    batch, heads, rows, d = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count, block = batch * heads * rows, rotation_block(d)
    rotate_rows[triton.cdiv(count, ROW_BLOCK), d // block](
        x, out, x_batch=x.stride(0), x_head=x.stride(1), x_row=x.stride(2), heads=heads, count=count,
        rows=rows, d=d, block=block, ROWS=ROW_BLOCK, num_warps=4,
    )  # fmt: skip
    return out
