"""Triton: find the sink tokens (`sinks.py`) among tokens, and store their pairs in sink_pairs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sinks_among(tokens, sink_row, sink_tokens: tl.constexpr):
    """Return which tokens are sinks of the row whose sink_index [S] is at `sink_row`; bool."""
    found = tokens < 0
    for place in range(sink_tokens):
        found = found | (tokens == tl.load(sink_row + place))
    return found


@triton.jit
def keep_sinks(
    # Keys or values of `tokens` [n, 1], broadcast over channels; pointers to the head's part of sink_pairs
    # [B, H, S, 2, d] and to the row's sink_index [S].
    x, tokens, channels, mask, head_sinks, sink_row,
    WHICH: tl.constexpr, sink_tokens: tl.constexpr, d: tl.constexpr,
):  # fmt: skip
    """Store the keys or values of sinks. WHICH: 0 for keys, 1 for values."""
    for place in range(sink_tokens):
        here = mask & (tokens == tl.load(sink_row + place))
        at = head_sinks + (place * 2 + WHICH) * d + channels + tl.zeros_like(tokens)
        tl.store(at, x.to(head_sinks.dtype.element_ty), here)
