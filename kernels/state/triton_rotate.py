"""Triton: `layout.rotated`, rows times the Hadamard matrix, in registers.

The matrix is never stored: log2(n) rounds compute sums and differences. A round moves the lowest bit of a channel's
index to the top; after the last round all bits are back in place.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
