"""Triton: the order of codes in memory (`records.py`), for one group of keys or values.

A group of 32 tokens is half a record, one of 128 tokens is two records.
"""

# WHICH: 0 for keys, 1 for values. BITS: of a number. Dimensions have the names of `records.py`.

from __future__ import annotations

import triton
import triton.language as tl

from . import records

RECORD, ROWS_FROM = tl.constexpr(records.RECORD), tl.constexpr(records.ROWS_FROM)
PARAM_BLOCK = tl.constexpr(records.PARAM_BLOCK)


@triton.jit
def by_word(x, BITS: tl.constexpr, WHICH: tl.constexpr):
    """Return a group's numbers [g, D] by word, in the order of memory: [words, numbers of a word]."""
    g: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    RECORDS: tl.constexpr = g // RECORD if g > RECORD else 1
    FIELDS: tl.constexpr = 16 // BITS
    LOADS: tl.constexpr = 4 if D * BITS >= 64 else D * BITS // 16
    if BITS < ROWS_FROM and WHICH == 0:
        # record, g, word // V, word % V, field, q, k0
        x = tl.reshape(x, [RECORDS, g // RECORDS // 8, D // FIELDS // LOADS, LOADS, FIELDS, 4, 2])
        x = tl.permute(x, (0, 2, 1, 5, 3, 6, 4))
    elif BITS < ROWS_FROM:
        # record, q, o, word of the load, e % s, k0, c, g
        x = tl.reshape(x, [RECORDS, g // RECORDS // 16, 2, LOADS, 4 // LOADS, 2, D // 8, 8])
        x = tl.permute(x, (0, 4, 2, 6, 7, 1, 3, 5))
        x = tl.reshape(x, [RECORDS, D // FIELDS // LOADS, FIELDS, g // RECORDS // 2 * LOADS, 2])
        x = tl.permute(x, (0, 1, 3, 4, 2))
    return tl.reshape(x, [g * D * BITS // 32, 32 // BITS])


@triton.jit
def circle_at(token, channel, g: tl.constexpr, D: tl.constexpr, WHICH: tl.constexpr):
    """Return where `by_word` puts a group's numbers of one bit: their words, and their places in the words' circles.

    Both are bits of token and channel in another order, so the sum of (token, 0) and (0, channel) is (token, channel).
    """
    LOADS: tl.constexpr = 4 if D >= 64 else D // 16
    # Groups of 16 tokens in a record, or in half of one.
    QS: tl.constexpr = 4 if g > 32 else 2
    within = token % (16 * QS)
    if WHICH == 0:
        count, half = channel // 8 + D // 8 * (token % 8), channel % 2
        lane = within // 8 * 4 + channel % 8 // 2
        word = (count // 16 // LOADS * (8 * QS) + lane) * LOADS + count // 16 % LOADS
    else:
        pair, half = token % 8 // 2, token % 2
        count = channel // 8 + D // 8 * (token % 16 // 8) + D // 4 * (pair % (4 // LOADS))
        word = (count // 16 * (8 * QS) + channel % 8 * QS + within // 16) * LOADS + pair // (4 // LOADS)
    return token // RECORD * (RECORD * D // 32) + word, half * 16 + count % 16


@triton.jit
def packed(levels, BITS: tl.constexpr, WHICH: tl.constexpr):
    """Return the words, int32 [words], of levels int32 [g, D]."""
    return tl.sum(by_word(levels, BITS, WHICH) << (tl.arange(0, 32 // BITS) * BITS)[None, :], 1)


@triton.jit
def store_words(
    words, codes, first, width: tl.constexpr, g: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, WHICH: tl.constexpr
):
    """Store a group's words. codes: the tier of `width` bytes a token; first: the group's first token in it."""
    PART: tl.constexpr = RECORD * D * BITS // 32
    LOADS: tl.constexpr = 4 if D * BITS >= 64 else D * BITS // 16
    # Words that are adjacent in both halves of a record.
    RUN: tl.constexpr = PART // 2 if BITS == ROWS_FROM else (2 if WHICH == 1 else 16) * LOADS
    word = tl.arange(0, words.shape[0])
    if g < RECORD:
        place = word // RUN * (2 * RUN) + first % RECORD // g * RUN + word % RUN
    else:
        place = word // PART * (RECORD * width // 4) + word % PART
    record = codes.to(tl.pointer_type(tl.int32), bitcast=True) + first // RECORD * (RECORD * width // 4)
    tl.store(record + WHICH * (RECORD * width // 4 - PART) + place, words)


@triton.jit
def place_of_params(channel, D: tl.constexpr):
    """Return the place of channels' scales and zero points among the D of a group of keys (`param_order`)."""
    BLOCK: tl.constexpr = PARAM_BLOCK if D > PARAM_BLOCK else D
    within = channel % BLOCK
    thread = within % 8 // 2 * (BLOCK // 4)
    return channel - within + thread + within // 16 * 4 + channel % 2 * 2 + within // 8 % 2
