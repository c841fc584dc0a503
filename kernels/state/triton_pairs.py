"""Triton: load pairs from the recent tier's ring or from the new tokens, and rotate them; find the sink tokens
(`sinks.py`) among tokens, and store their pairs."""

from __future__ import annotations

import triton
import triton.language as tl

# Elements that `hadamard` exchanges between threads at once, each through 4 bytes of shared memory (99 KiB on an L4).
MOST_AT_ONCE = tl.constexpr(16384)


@triton.jit
def load_pairs(
    # k or v [B, H, T, d] and its first three strides; the ring [B, H, W, 2, d].
    new, strides, recent,
    # Indices of tokens and channels, broadcast over each other; mask of valid elements.
    tokens, channels, mask,
    # The KV head's index in [B, H], H, and the cached tokens. WHICH: 0 for keys, 1 for values.
    bh, heads, length, WHICH: tl.constexpr, window, d,
):  # fmt: skip
    """Load keys or values of `tokens` in float32: cached tokens from the ring, others from the new tokens."""
    ring = recent + ((bh * window + tokens % window) * 2 + WHICH) * d + channels
    cached = tokens < length
    head_base = bh // heads * strides[0] + bh % heads * strides[1]
    fresh = new + head_base + (tokens - length) * strides[2] + channels
    old = tl.load(ring, mask & cached, 0.0).to(tl.float32)
    return tl.where(cached, old, tl.load(fresh, mask & (tokens >= length), 0.0).to(tl.float32))


@triton.jit
def sinks_among(tokens, sink_row, sink_tokens: tl.constexpr):
    """Return which tokens are sinks of the row whose sink_index [S] is at `sink_row`; bool."""
    found = tokens < 0
    for place in range(sink_tokens):
        found = found | (tokens == tl.load(sink_row + place))
    return found


@triton.jit
def keep_sinks(
    # Keys or values of `tokens` [n, 1], broadcast over channels; pointers to the head's keys or values in sink_pairs
    # [B, H, S, 2, d] and to the row's sink_index [S].
    x, tokens, channels, mask, head_sinks, sink_row, sink_tokens: tl.constexpr, d: tl.constexpr,
):  # fmt: skip
    """Store the keys or values of sinks."""
    for place in range(sink_tokens):
        here = mask & (tokens == tl.load(sink_row + place))
        tl.store(head_sinks + place * 2 * d + channels + tl.zeros_like(tokens), x.to(head_sinks.dtype.element_ty), here)


@triton.jit
def hadamard(x, size: tl.constexpr):
    """Multiply blocks of `size` elements of float32 x, a power of two, by the orthonormal Hadamard matrix
    (`layout.rotated`), in registers; 1 changes nothing.

    The matrix is never stored: log2(size) rounds compute sums and differences. A round moves the lowest bit of a
    channel's index to the top; after the last round all bits are back in place. More elements than MOST_AT_ONCE are
    halved first. FLOPs: log2(size) per element.
    """
    if size > 1:
        shape: tl.constexpr = x.shape
        rows: tl.constexpr = x.numel // size
        if x.numel > MOST_AT_ONCE:
            one, other = tl.split(tl.permute(tl.reshape(x, [2, rows // 2, size]), (1, 2, 0)))
            x = tl.permute(tl.join(hadamard(one, size), hadamard(other, size)), (2, 0, 1))
        else:
            for step in tl.static_range(1, 11):
                if size >> step > 0:
                    one, other = tl.split(tl.reshape(x, [rows, size // 2, 2]))
                    x = tl.reshape(tl.permute(tl.join(one + other, one - other), (0, 2, 1)), [rows, size])
            x *= size**-0.5
        x = tl.reshape(x, shape)
    return x
