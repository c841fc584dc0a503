"""Triton: pairs as they come, from the recent tier's ring or from the new tokens; strides as in `triton_append`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_pairs(
    # k or v [B, H, T, d], the ring [B, H, W, 2, d].
    new, recent,
    # Which of them, broadcast over one another: tokens' numbers and channels; `mask`: what is there at all.
    tokens, channels, mask,
    # The KV head's number in [B, H], where its part of `new` starts, from one new token to the next, cached tokens.
    bh, head_base, stride, length,
    # WHICH: 0 for keys, 1 for values. APART: the ring is `rotate_groups`' and has all of them.
    WHICH: tl.constexpr, window, d, APART: tl.constexpr,
):  # fmt: skip
    """Keys or values of `tokens`, in float32: from the ring where they are cached, from the new ones otherwise."""
    ring = recent + ((bh * window + tokens % window) * 2 + WHICH) * d + channels
    if APART:
        found = tl.load(ring, mask, 0.0).to(tl.float32)
    else:
        cached = tokens < length
        fresh = new + head_base + (tokens - length) * stride + channels
        old = tl.load(ring, mask & cached, 0.0).to(tl.float32)
        found = tl.where(cached, old, tl.load(fresh, mask & (tokens >= length), 0.0).to(tl.float32))
    return found
