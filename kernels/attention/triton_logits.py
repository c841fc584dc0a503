"""Triton: what the attention kernels have in common: operations on logits, and the places of kept logits and of their
bases (`kept_logits.py`) among those of one KV head."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from specache_compile.kernels.codes import records

from . import kept_logits
from .query import SEEN

LOG2E = tl.constexpr(math.log2(math.e))
RECORD, BLOCK, OCTET = (tl.constexpr(n) for n in (records.RECORD, kept_logits.LOGIT_BLOCK, kept_logits.OCTET))
# An additive mask below this value hides its token; other masks set logits to -inf.
HIDDEN = tl.constexpr(SEEN)


@triton.jit
def capped(logits, softcap, CAP: tl.constexpr):
    if CAP:  # tanh(x) = 2σ(2x) - 1
        logits = (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0) * softcap
    return logits


@triton.jit
def visible(logits, softcap, mask, rows, columns, there, causal, MASK: tl.constexpr, CAP: tl.constexpr):
    """Return logits [ROWS, n], capped, under a mask; -inf where it hides a token, or not both `there` [n] and `causal`.

    rows, columns: offsets [ROWS] and [n] of the mask's elements. A mask of padding takes one load per token.
    """
    logits = capped(logits, softcap, CAP)
    if MASK == 3:
        there = there & (tl.load(mask + columns, there, 0) != 0)
    seen, at = there[None, :] & causal, rows[:, None] + columns[None, :]
    if MASK == 1:
        seen = seen & (tl.load(mask + at, seen, 0) != 0)
    if MASK == 2:
        logits += tl.load(mask + at, seen, 0.0).to(tl.float32)
    return tl.where(seen, logits, float("-inf"))


@triton.jit
def finite(highest):
    """Return the maximum to subtract from logits: 0 if no logit is finite."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def place_of_logit(token, row, PAIRS: tl.constexpr):
    """Return the index of a token's logit among [C/64, 2, 8, PAIRS, 8]. PAIRS: R'/2."""
    half = token // RECORD * 2 + row % 2
    return ((half * (RECORD // OCTET) + token % RECORD // OCTET) * PAIRS + row // 2) * OCTET + token % OCTET


@triton.jit
def place_of_base(block, row, PAIRS: tl.constexpr):
    """Return the index of the base of a block of 16 tokens among [C/64, 2, 4, PAIRS]."""
    blocks: tl.constexpr = RECORD // BLOCK
    return ((block // blocks * 2 + row % 2) * blocks + block % blocks) * PAIRS + row // 2


@triton.jit
def block_scores(
    head, block, there, lane, lanes: tl.constexpr, queries: tl.constexpr, PAIRS: tl.constexpr, ADDITIVE: tl.constexpr
):
    """Return a lane's scores of the tokens of blocks [n] that are `there`, float32 [n, 16]; -1 for hidden tokens.

    A score is Σ over the query group of 2^(logit - lse).
    The kept logits of sinks and of tokens that a bool mask hides are -inf in all rows.

    head: pointers to a head's logits, base and lse, and to its first query head's mask in this lane; the mask's strides
        of query heads and tokens.
    """
    logits, base, lse, mask, m_head, m_token = head
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    score = tl.zeros(token.shape, tl.float32)
    highest = tl.full(token.shape, float("-inf"), tl.float32)
    for query in tl.static_range(queries):
        row = query * lanes + lane
        offset = tl.load(logits + place_of_logit(token, row, PAIRS), there[:, None], float("-inf")).to(tl.float32)
        peak = tl.load(base + place_of_base(block, row, PAIRS), there, 0.0)
        score += tl.exp2(offset + (peak - tl.load(lse + row))[:, None])
        highest = tl.maximum(highest, offset)
    seen = highest > float("-inf")
    if ADDITIVE:
        visible = token < 0
        for query in tl.static_range(queries):
            bias = tl.load(mask + query * m_head + token * m_token, there[:, None], float("-inf"))
            visible |= bias.to(tl.float32) > HIDDEN
        seen &= visible
    return tl.where(seen, score, -1.0)
