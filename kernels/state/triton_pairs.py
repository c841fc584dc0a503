"""Triton: load pairs from the recent tier's ring or from the new tokens; strides as in `triton_append`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_pairs(
    # k or v [B, H, T, d], the ring [B, H, W, 2, d].
    new, recent,
    # Indices of tokens and channels, broadcast over each other; mask of valid elements.
    tokens, channels, mask,
    # The KV head's index in [B, H], the start of its part of `new`, the stride of new tokens, and the cached tokens.
    bh, head_base, stride, length,
    # WHICH: 0 for keys, 1 for values. APART: the ring is `rotate_groups`' output and has all tokens.
    WHICH: tl.constexpr, window, d, APART: tl.constexpr,
):  # fmt: skip
    """Load keys or values of `tokens` in float32: cached tokens from the ring, others from the new tokens."""
    ring = recent + ((bh * window + tokens % window) * 2 + WHICH) * d + channels
    if APART:
        found = tl.load(ring, mask, 0.0).to(tl.float32)
    else:
        cached = tokens < length
        fresh = new + head_base + (tokens - length) * stride + channels
        old = tl.load(ring, mask & cached, 0.0).to(tl.float32)
        found = tl.where(cached, old, tl.load(fresh, mask & (tokens >= length), 0.0).to(tl.float32))
    return found
