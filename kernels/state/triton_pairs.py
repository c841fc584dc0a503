"""Triton: load pairs from the recent tier's ring or from the new tokens."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_pairs(
    # k or v [B, H, T, d] and its first three strides; the ring [B, H, W, 2, d].
    new, strides, recent,
    # Indices of tokens and channels, broadcast over each other; mask of valid elements.
    tokens, channels, mask,
    # The KV head's index in [B, H], H, and the cached tokens.
    bh, heads, length,
    # WHICH: 0 for keys, 1 for values. APART: the ring is `copy_groups`' output and has all tokens.
    WHICH: tl.constexpr, window, d, APART: tl.constexpr = False,
):  # fmt: skip
    """Load keys or values of `tokens` in float32: cached tokens from the ring, others from the new tokens."""
    ring = recent + ((bh * window + tokens % window) * 2 + WHICH) * d + channels
    if APART:
        found = tl.load(ring, mask, 0.0).to(tl.float32)
    else:
        cached = tokens < length
        head_base = bh // heads * strides[0] + bh % heads * strides[1]
        fresh = new + head_base + (tokens - length) * strides[2] + channels
        old = tl.load(ring, mask & cached, 0.0).to(tl.float32)
        found = tl.where(cached, old, tl.load(fresh, mask & (tokens >= length), 0.0).to(tl.float32))
    return found
