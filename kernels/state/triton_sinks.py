"""Triton: the sink tokens (`sinks.py`) among others, and their pairs into sink_pairs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sinks_among(tokens, sink_row, sink_tokens: tl.constexpr):
    """Which of the tokens are sinks of the row whose sink_index [S] is at `sink_row`; bool."""
    found = tokens < 0
    for place in range(sink_tokens):
        found = found | (tokens == tl.load(sink_row + place))
    return found


@triton.jit
def keep_sinks(
    # Keys or values of `tokens` [n, 1], broadcast over channels; where one sink's key and value of a head lie in
    # sink_pairs [B, H, S, 2, d], and the row's sink_index [S].
    x, tokens, channels, mask, head_sinks, sink_row,
    WHICH: tl.constexpr, sink_tokens: tl.constexpr, d: tl.constexpr,
):  # fmt: skip
    """Store those that are a sink's. WHICH: 0 for keys, 1 for values."""
    for place in range(sink_tokens):
        here = mask & (tokens == tl.load(sink_row + place))
        at = head_sinks + (place * 2 + WHICH) * d + channels + tl.zeros_like(tokens)
        tl.store(at, x.to(head_sinks.dtype.element_ty), here)
