"""Triton: the places of kept logits and of their bases (`kept_logits.py`) among those of one KV head."""

from __future__ import annotations

import triton
import triton.language as tl

from specache_compile.kernels.codes import records

from . import kept_logits
from .attention_ops import SEEN

RECORD, BLOCK, OCTET = (tl.constexpr(n) for n in (records.RECORD, kept_logits.LOGIT_BLOCK, kept_logits.OCTET))
# An additive mask below this value hides its token; other masks set logits to -inf.
HIDDEN = tl.constexpr(SEEN)


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
def load_kept(logits, base, block, there, row, PAIRS: tl.constexpr):
    """Load a row's offsets float32 [n, 16] of the tokens of blocks [n], -inf if not `there`, and their bases [n]."""
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    offset = tl.load(logits + place_of_logit(token, row, PAIRS), there[:, None], float("-inf")).to(tl.float32)
    return offset, tl.load(base + place_of_base(block, row, PAIRS), there, 0.0)


@triton.jit
def seen_by_any(mask, tokens, there, highest, m_head, m_token, queries: tl.constexpr, ADDITIVE: tl.constexpr):
    """Return which tokens a query head of the group sees. mask: of the first head; highest: their largest offset."""
    seen = highest > float("-inf")
    if ADDITIVE:
        visible = tokens < 0
        for query in tl.static_range(queries):
            bias = tl.load(mask + query * m_head + tokens * m_token, there[:, None], float("-inf"))
            visible |= bias.to(tl.float32) > HIDDEN
        seen &= visible
    return seen
