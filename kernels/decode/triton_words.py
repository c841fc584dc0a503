"""Triton: the numbers in 32-bit words of codes (`records.py`), and parameters of 8 bits, four to a word.

Instructions per number are the limit of attention over codes, so numbers are unpacked in pairs, one in each half of a
word, without a conversion.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def joined(found, count: tl.constexpr):
    """Join `count` tensors [...] to [..., 2, ..., 2]; the first new dimension is the index's highest bit."""
    for step in tl.static_range(1, 5):
        if count >> step > 0:
            pairs = ()
            for at in tl.static_range(count >> step):
                pairs = pairs + (tl.join(found[at], found[at + (count >> step)]),)
            found = pairs
    return found[0]


@triton.jit
def fields_of(words, bits: tl.constexpr, IN_PLACE: tl.constexpr):
    """Unpack int32 words [n] to [n, F], F = 16 / bits: field f of both halves.

    IN_PLACE: a field stays at its place in a byte, times 2**(bits · f % 8), so that it costs one AND; else its lowest
    bit moves to bit 0.
    """
    planes: tl.constexpr = 8 // bits
    lowest: tl.constexpr = 0x10001 * ((1 << bits) - 1)
    found = ()
    for field in tl.static_range(2 * planes):
        if IN_PLACE:
            found = found + ((words >> (field // planes * 8)) & (lowest << field % planes * bits),)
        else:
            found = found + ((words >> field * bits) & lowest,)
    return tl.reshape(joined(found, 2 * planes), [words.shape[0], 2 * planes])


@triton.jit
def halves(pairs, kind: tl.constexpr):
    """Return int32 [...] as [..., 2] in `kind`: each half's bits as a 16-bit float, or its number as a float32."""
    found = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    return found.to(tl.float32) if kind == tl.float32 else found.to(kind, bitcast=True)


@triton.jit
def rotated_left(x, by: tl.constexpr):
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits << by) | (bits >> (32 - by))).to(tl.int32, bitcast=True)


@triton.jit
def expanded(circles):
    """Expand int32 words [n] of the trellis code to words of 2-bit levels [n, 2]: the even numbers, then the odd ones.

    Six instructions for 32 numbers (`trellis.expanded`).
    """
    before = rotated_left(circles, 1)
    both = circles ^ rotated_left(circles, 3)
    return tl.join(rotated_left(before ^ (both & 0x55555555), 1), before ^ (both & ~0x55555555))


@triton.jit
def scales_of(words):
    """Return the scales in words [...] of four bytes as float16 [..., 2, 2]; byte 2·j + i is at [..., i, j]."""
    return halves(tl.join((words << 7) & 0x7F807F80, (words >> 1) & 0x7F807F80), tl.float16)


@triton.jit
def zeros_of(words):
    """Return the zero points in words [...] of four bytes as float16, in units of 16 scales, in `scales_of`'s order.

    1024 + 128 + z is a float16 with the bits of z in its mantissa.
    """
    lower, upper = (words & 0x00FF00FF) ^ 0x64806480, ((words >> 8) & 0x00FF00FF) ^ 0x64806480
    return halves(tl.join(lower, upper), tl.float16) * 0.0078125 - 9.0
