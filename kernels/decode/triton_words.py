"""Triton: the numbers in 32-bit words of codes (`records.py`), and parameters of 8 bits, four to a word.

Instructions per number are the limit of attention over codes, so numbers are unpacked in pairs, one in each half of a
word, without a conversion. Threads load only what they use: their words, and the parameters of their values' tokens,
which are equal for all g.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime import JITFunction

from specache_compile.kernels.codes.records import VECTOR

VECTOR_WORDS = tl.constexpr(VECTOR)


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


# The interpreter has neither inline assembly nor conversions to bfloat16.
COMPILED = tl.constexpr(isinstance(joined, JITFunction))


@triton.jit
def upper_bytes(words):
    """Return the upper byte of each half, by one instruction, which the compiler does not find."""
    if COMPILED:
        found = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0x4341;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        found = (words >> 8) & 0x00FF00FF
    return found


@triton.jit
def fields_of(words, bits: tl.constexpr, NEST: tl.constexpr):
    """Unpack int32 words [n] to [n, F], F = 16 / bits: field f of both halves.

    NEST: a field stays at its place in a byte, times 2**(bits · f % 8), and costs one AND at most. All lower fields of
    the same NEST fields stay with it (`nested`). 0: each field's lowest bit moves to bit 0.
    """
    planes: tl.constexpr = 8 // bits
    found = ()
    for byte in tl.static_range(2):
        whole = words & 0x00FF00FF if byte == 0 else upper_bytes(words)
        for plane in tl.static_range(planes):
            if NEST == 0:
                found = found + ((words >> byte * 8 + plane * bits) & 0x10001 * ((1 << bits) - 1),)
            elif plane == NEST - 1 and planes == NEST:
                found = found + (whole,)
            else:
                levels = 0x10001 * ((1 << bits * (plane % NEST + 1)) - 1) << plane // NEST * NEST * bits
                found = found + (whole & levels,)
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
def numbers_of(words, form: tl.constexpr, kind: tl.constexpr):
    """Unpack a record's words to numbers in `kind`, [n, 8, 4, V, F, 2] by load, thread (g, q), word, field and half.

    form: a named tuple with dim (D), bits, in_trellis and nest (NEST).
    """
    n: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = form.dim * form.bits // 16
    LOADS: tl.constexpr = WORDS if WORDS < VECTOR_WORDS else VECTOR_WORDS
    if form.in_trellis:
        fields = fields_of(tl.reshape(expanded(words), [2 * n]), 2, form.nest)
        fields = tl.permute(tl.reshape(fields, [n, 2, 8]), (0, 2, 1))
    else:
        fields = fields_of(words, form.bits, form.nest)
    return tl.reshape(halves(fields, kind), [n // (32 * LOADS), 8, 4, LOADS, 16 // form.bits, 2])


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


@triton.jit
def columns_of(x, count: tl.constexpr):
    """Split x [n, count], count = 2**m, into a tuple of its columns [n]."""
    found = (x,)
    for step in tl.static_range(4):
        if count >> step > 1:
            evens, odds = (), ()
            for at in tl.static_range(1 << step):
                even, odd = tl.split(tl.reshape(found[at], [x.shape[0], count >> step + 1, 2]))
                evens, odds = evens + (even,), odds + (odd,)
            found = evens + odds
    columns = ()
    for at in tl.static_range(count):
        columns = columns + (tl.reshape(found[at], [x.shape[0]]),)
    return columns


@triton.jit
def single_sums(sums, NEST: tl.constexpr, INNER: tl.constexpr):
    """Convert sums [n, ROWS] of nested fields to sums of single fields. INNER: adjacent rows of one field."""
    N: tl.constexpr = sums.shape[0]
    OUTER: tl.constexpr = N // (NEST * INNER)
    ROWS: tl.constexpr = sums.shape[1]
    x = tl.permute(tl.reshape(sums, [OUTER, NEST, INNER, ROWS]), (0, 2, 3, 1))
    nested = columns_of(tl.reshape(x, [N * ROWS // NEST, NEST]), NEST)
    found = (nested[0],)
    for plane in tl.static_range(1, NEST):
        found = found + (nested[plane] - nested[plane - 1],)
    x = tl.reshape(joined(found, NEST), [OUTER, INNER, ROWS, NEST])
    return tl.reshape(tl.permute(x, (0, 3, 1, 2)), [N, ROWS])


@triton.jit
def unpacked_values(words, form: tl.constexpr, kind: tl.constexpr):
    """Return a record's codes as the left side of a product, [D, 64] in `kind`; row c is channel c."""
    D: tl.constexpr = form.dim
    found = numbers_of(words, form, kind)
    LOADS: tl.constexpr = found.shape[3]
    found = tl.reshape(tl.permute(found, (0, 4, 1, 2, 3, 5)), [4 // LOADS, 2, D // 8, 8, 4, LOADS, 2])
    found = tl.reshape(tl.permute(found, (2, 3, 1, 4, 5, 0, 6)), [D, 2, 4, 2, 2, 2])  # c, (g, o), q, e1, e0, k0
    return tl.reshape(tl.permute(found, (0, 1, 3, 2, 4, 5)), [D, 64])


@triton.jit
def loaded(pointers, there, PARTIAL: tl.constexpr):
    return tl.load(pointers, there, 0) if PARTIAL else tl.load(pointers)


@triton.jit
def constant_like(x, value: tl.constexpr):
    """Return a constant; Triton 3.6 rounds a constant in bfloat16 to float16's range."""
    return tl.full(x.shape, value, tl.float32).to(x.dtype)


@triton.jit
def scales_in(lower, kind: tl.constexpr):
    """Return the 8-bit scales in the lower byte of each half as [..., 2]; bfloat16 in units of 2^-16."""
    if kind == tl.bfloat16:  # the bits at their places have exponents that are 112 lower
        found = halves(lower << 4, kind)
        return found * constant_like(found, 2.0**96)
    return halves(lower << 7, tl.float16).to(kind)


@triton.jit
def zeros_in(lower, kind: tl.constexpr):
    """Return the 8-bit zero points in the lower byte of each half as [..., 2], in scales; bfloat16 · 2^-130."""
    if kind == tl.bfloat16:
        found = halves(lower ^ 0x00800080, kind)
        return found - constant_like(found, 2.0**-126)
    return (halves(lower ^ 0x64806480, tl.float16) * 0.125 - 144.0).to(kind)


@triton.jit
def token_scales(params, left, PARTIAL: tl.constexpr, kind: tl.constexpr):
    """Return a record's scales in the trellis code, [512] by thread (g, q), o, e and k0; they are equal for all g.

    left: tokens from the record's first one on.
    """
    if params.dtype.element_ty == tl.uint8:
        at = tl.arange(0, 128) % 16
        words = loaded(params.to(tl.pointer_type(tl.int32), bitcast=True) + at, at // 4 * 16 < left, PARTIAL)
        found = scales_in(tl.join(words & 0x00FF00FF, (words >> 8) & 0x00FF00FF), kind)
    else:
        i = tl.arange(0, 512)
        at = i // 8 % 4 * 16 + i // 256 * 8 + i % 8
        found = loaded(params + at, at // 16 * 16 < left, PARTIAL).to(kind)
        found = tl.permute(tl.reshape(found, [2, 8, 4, 2, 2, 2]), (1, 2, 0, 3, 5, 4))
    return tl.reshape(found, [512])


@triton.jit
def level_params(params, left, GROUPS: tl.constexpr, PARTIAL: tl.constexpr, kind: tl.constexpr):
    """Return a record's scales and zeros, two tuples with a tensor as in `token_scales` for each group of channels."""
    EIGHT: tl.constexpr = params.dtype.element_ty == tl.uint8
    # A thread loads its 16 tokens' parameters, eight elements at a time: pairs of bytes, or whole parameters.
    SIZE: tl.constexpr = 16 * GROUPS if EIGHT else 32 * GROUPS
    i = tl.arange(0, 32 * SIZE)
    token = i // 8 % 4 * 16
    at = i // 8 % 4 * SIZE + i // 256 * 8 + i % 8
    if EIGHT:
        found = loaded(params.to(tl.pointer_type(tl.int16), bitcast=True) + at, token < left, PARTIAL).to(tl.int32)
        found = tl.permute(tl.reshape(found, [SIZE // 8, 32, 8]), (1, 0, 2))
        even, odd = tl.split(tl.permute(tl.reshape(found, [256, 2, GROUPS]), (0, 2, 1)))
        pairs = (even & 0xFFFF) | (odd << 16)  # two adjacent parameters of two adjacent tokens
        lower, upper = pairs & 0x00FF00FF, (pairs >> 8) & 0x00FF00FF
        if GROUPS > 1:
            x = tl.reshape(tl.join(lower, upper), [256, 2, GROUPS])
            lower, upper = tl.split(tl.permute(x, (0, 2, 1)))
        scales, zeros = scales_in(lower, kind), zeros_in(upper, kind)  # [256, GROUPS, 2]
        scales, zeros = tl.permute(scales, (0, 2, 1)), tl.permute(zeros, (0, 2, 1))
    else:
        found = loaded(params + at, token < left, PARTIAL).to(kind)
        found = tl.permute(tl.reshape(found, [SIZE // 8, 32, 8]), (1, 0, 2))
        scales, zeros = tl.split(tl.permute(tl.reshape(found, [512, 2, GROUPS]), (0, 2, 1)))
    scales, zeros = tl.reshape(scales, [512, GROUPS]), tl.reshape(zeros, [512, GROUPS])
    return columns_of(scales, GROUPS), columns_of(zeros, GROUPS)


@triton.jit
def in_weights_order(x):
    """Permute x [512], as in `token_scales`, to the weights' order [2, 1, 8, 4, 2, 2, 2]."""
    x = tl.permute(tl.reshape(x, [8, 4, 2, 2, 2, 2]), (2, 0, 1, 3, 4, 5))
    return x[:, None, :, :, :, :, :]


def nested(dim: int, bits: int, in_trellis: bool, channels: int) -> int:
    """Return NEST: fields of a byte whose numbers share a token and a scale; 0 if fields of a byte are of many tokens.

    channels: adjacent ones with one scale, at least 8.
    """
    planes = 8 // (2 if in_trellis else bits)
    return min(planes, channels // 8) if dim // (16 if in_trellis else 8) >= planes else 0
