"""Triton: the values in words of codes (`records.py`) as the left side of a product, and their parameters.

Threads load only what they use: their words, and the parameters of their tokens, which are equal for all g.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specache_compile.kernels.codes.records import VECTOR

from .triton_words import expanded, fields_of, halves, joined

VECTOR_WORDS = tl.constexpr(VECTOR)


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
def upper_bytes(words, PRMT: tl.constexpr):
    """Return the upper byte of each half; PRMT: by one instruction, which the compiler does not find."""
    if PRMT:
        found = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0x4341;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        found = (words >> 8) & 0x00FF00FF
    return found


@triton.jit
def nested_fields(words, bits: tl.constexpr, NEST: tl.constexpr, PRMT: tl.constexpr):
    """Unpack int32 words [n] to [n, 16 / bits] as `triton_words.fields_of` does, in place, but with all lower fields of
    the same NEST fields."""
    planes: tl.constexpr = 8 // bits
    found = ()
    for byte in tl.static_range(2):
        whole = words & 0x00FF00FF if byte == 0 else upper_bytes(words, PRMT)
        for plane in tl.static_range(planes):
            if plane == NEST - 1 and planes == NEST:
                found = found + (whole,)
            else:
                levels = 0x10001 * ((1 << bits * (plane % NEST + 1)) - 1) << plane // NEST * NEST * bits
                found = found + (whole & levels,)
    return tl.reshape(joined(found, 2 * planes), [words.shape[0], 2 * planes])


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
def unpacked_values(
    words, D: tl.constexpr, bits: tl.constexpr, TRELLIS: tl.constexpr, NEST: tl.constexpr, PRMT: tl.constexpr,
    kind: tl.constexpr,
):  # fmt: skip
    """Return a record's codes as the left side of a product, [D, 64] in `kind`; row c is channel c."""
    LOADS: tl.constexpr = D * bits // 16 if D * bits // 16 < VECTOR_WORDS else VECTOR_WORDS
    STEPS: tl.constexpr = 4 // LOADS
    F: tl.constexpr = 16 // bits
    level_bits: tl.constexpr = 2 if TRELLIS else bits
    n: tl.constexpr = words.shape[0]
    if TRELLIS:
        words = tl.reshape(expanded(words), [2 * n])
    fields = nested_fields(words, level_bits, NEST, PRMT) if NEST > 0 else fields_of(words, level_bits, False)
    if TRELLIS:
        fields = tl.permute(tl.reshape(fields, [n, 2, 8]), (0, 2, 1))
    found = tl.reshape(halves(fields, kind), [n // (32 * LOADS), 8, 4, LOADS, F, 2])
    found = tl.reshape(tl.permute(found, (0, 4, 1, 2, 3, 5)), [STEPS, 2, D // 8, 8, 4, LOADS, 2])
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
    """Return a record's scales in the trellis code, [2, 1, 8, 4, 2, 2, 2] by o, thread (g, q), e and k0.

    They are equal for all g. left: tokens from the record's first one on.
    """
    if params.dtype.element_ty == tl.uint8:
        at = tl.arange(0, 128) % 16
        words = loaded(params.to(tl.pointer_type(tl.int32), bitcast=True) + at, at // 4 * 16 < left, PARTIAL)
        found = scales_in(tl.join(words & 0x00FF00FF, (words >> 8) & 0x00FF00FF), kind)
        found = tl.permute(tl.reshape(found, [8, 4, 2, 2, 2, 2]), (2, 0, 1, 3, 4, 5))
    else:
        i = tl.arange(0, 512)
        at = i // 8 % 4 * 16 + i // 256 * 8 + i % 8
        found = loaded(params + at, at // 16 * 16 < left, PARTIAL).to(kind)
        found = tl.permute(tl.reshape(found, [2, 8, 4, 2, 2, 2]), (0, 1, 2, 3, 5, 4))
    return found[:, None, :, :, :, :, :]


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
    scales = columns_of(tl.reshape(scales, [512, GROUPS]), GROUPS)
    zeros = columns_of(tl.reshape(zeros, [512, GROUPS]), GROUPS)
    by_group, zeros_by_group = (), ()
    for group in tl.static_range(GROUPS):
        by_group = by_group + (in_weights_order(scales[group]),)
        zeros_by_group = zeros_by_group + (in_weights_order(zeros[group]),)
    return by_group, zeros_by_group


@triton.jit
def in_weights_order(x):
    """Permute x [512] by thread (g, q) and token to [2, 1, 8, 4, 2, 2, 2] as in `token_scales`."""
    x = tl.permute(tl.reshape(x, [8, 4, 2, 2, 2, 2]), (2, 0, 1, 3, 4, 5))
    return x[:, None, :, :, :, :, :]
