"""Triton: the values' half of attention over the low-bit tier, at 1, 2 and 4 bits; `records.py` has the order of codes.

It reads the logits that the keys' half keeps. Instructions per stored number are the limit, so the loop has no shared
memory, no barrier, and no layout conversion.
"""

# - A program has one warp. A record's words are the left side of a product, channels × tokens, in the registers of the
#   threads that load them. The weights of the query rows, times the tokens' scales, are its columns; with fewer than
#   eight rows, columns repeat them.
# - Codes are 16-bit floats below the normal range, as in `triton_keys`. A row of the product has the codes of one field
#   and of all fields below it in their byte (`nested_fields`), which saves an AND per byte: one code's sum is the
#   difference of two rows. Rows of one product must then share their scales, so each group of channels has a product.
# - Products with ones sum the weights, and the weights times zero points. In the trellis code, zero points are -3/2 · s.
# - A weight is 2^(logit - lse): there is no running maximum. float16 has too small a range for that, so its weights are
#   relative to the split's largest base. bfloat16's range holds weights · 2^64, whose sums are normal float32 numbers.
# - Split i of n has the records i, i + n, i + 2·n, ..., so that splits of one head skip equally many.
#
# Skipping. With `cut` a record is left out if all its bases are below lse + cut: the weights of its tokens, relative to
# all tokens, are below 2^cut in each query row. Of n low-bit tokens, the weights left out sum to less than n · 2^cut = m.
# The others are divided by their own sum, so the output is Σ w·v / (1 - m') with m' < m, instead of Σ w·v + m' · v',
# where v' is a mean of the values left out. It differs by m' · (v' - out), so by less than 2 · m · max |v|.
#
# As in `triton_keys`, kWidth determines the order of tokens: 4 for products with codes, 2 for the sum of weights.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specache_compile.kernels.codes.records import RECORD, VECTOR, stored_dim
from specache_compile.kernels.codes.trellis import is_trellis
from specache_compile.kernels.codes.triton_words import expanded, fields_of, halves, joined
from specache_compile.kernels.state.page_table import has_table, shape_of_scores
from specache_compile.kernels.state.triton_cursor import AT_LOW_BIT, place_in_page

from .kept_logits import LOWEST
from .triton_decode import DecodeInputs, Sums, empty_sums, group_of, rows_of, splits_of

VECTOR_WORDS, LOWEST_BASE = tl.constexpr(VECTOR), tl.constexpr(LOWEST)
KINDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# Registers hold D · ROWS sums; a program has fewer rows at D = 256.
MOST_SUMS = 4096
# Programs per multiprocessor that the registers allow.
PROGRAMS = 20
# Records whose bases are compared with `cut` at once.
LOOK = 16


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
            if plane == NEST - 1 and NEST == planes:
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
    if PARTIAL:
        found = tl.load(pointers, there, 0)
    else:
        found = tl.load(pointers)
    return found


@triton.jit
def scales_in(lower, kind: tl.constexpr):
    """Return the 8-bit scales in the lower byte of each half as [..., 2]; bfloat16 in units of 2^-16."""
    if kind == tl.bfloat16:
        found = halves((lower << 4) | 0x30003000, kind)
    else:
        found = halves(lower << 7, tl.float16).to(kind)
    return found


@triton.jit
def zeros_in(lower, kind: tl.constexpr):
    """Return the 8-bit zero points in the lower byte of each half as [..., 2], in scales; bfloat16 · 2^-130."""
    if kind == tl.bfloat16:
        lowest = tl.full([1], 2.0**-126, tl.float32).to(tl.bfloat16)
        found = halves(lower ^ 0x00800080, kind)
        found -= tl.broadcast_to(tl.reshape(lowest, [1] * len(found.shape)), found.shape)
    else:
        found = (halves(lower ^ 0x64806480, tl.float16) * 0.125 - 144.0).to(kind)
    return found


@triton.jit
def token_scales(params, left, PARTIAL: tl.constexpr, kind: tl.constexpr):
    """Return a record's scales in the trellis code, [2, 1, 8, 4, 2, 2, 2] by o, thread (g, q), e and k0; equal for all
    g. left: tokens from the record's first one on."""
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


@triton.jit
def right_side(weights):
    """Return weights [2, NT, 8, 4, 2, 2, 2] as the right side of a product with codes, [64, ROWS]."""
    return tl.reshape(tl.permute(weights, (0, 4, 3, 5, 6, 1, 2)), [64, weights.shape[1] * 8])


@triton.jit
def with_record(
    # Sums of values [D/GROUPS, ROWS] of each group of channels, sums of zeros [16, ROWS] of each, and the weights' sum.
    sums,
    # As in `sum_values`: logits and base at the places of the head's first record; what weights are relative to
    # [NT, 8]; the row's cursor, the KV head, the head's first record, and the number of low-bit tokens.
    tile, codes, value_params, logits, base, shift, cursor, head, heads, first_record, low_bit,
    D: tl.constexpr, width: tl.constexpr, bits: tl.constexpr, GROUPS: tl.constexpr, TRELLIS: tl.constexpr,
    NEST: tl.constexpr, PARTIAL: tl.constexpr, PAGED: tl.constexpr, PRMT: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Return the sums with those of record `tile`."""
    NT: tl.constexpr = base.shape[0] // 32
    number = first_record + tile
    left = low_bit - tile * 64
    if PAGED:
        token = tl.zeros([], tl.int64) + tile * 64
        number = place_in_page(cursor, head, token, heads, token >= 0) // 64
    words = tl.load(codes + (number * (16 * width) + (16 * width - 2 * D * bits)) + tl.arange(0, 2 * D * bits))
    params = value_params + number * (64 if TRELLIS else 128 * GROUPS)
    if PARTIAL:
        here = tl.arange(0, NT * 256) // 8 % 4 * 16 < left
        above = tl.load(logits, tl.broadcast_to(here[None, :], [2, NT * 256]), float("-inf"))
    else:
        above = tl.load(logits)
    over = tl.reshape(tl.load(base), [NT, 8, 4]) - shift[:, :, None]
    above = tl.reshape(above.to(tl.float32), [2, NT, 8, 4, 8])
    weights = tl.reshape(tl.exp2(above + over[None, :, :, :, None]).to(kind), [2, NT, 8, 4, 2, 2, 2])
    values = unpacked_values(words, D, bits, TRELLIS, NEST, PRMT, kind)
    ones = tl.full([16, 64], 1.0, kind)
    found, offsets = (), ()
    if TRELLIS:
        scaled = right_side(weights * token_scales(params, left, PARTIAL, kind))
        found = (tl.dot(values, scaled, sums[0], input_precision="ieee"),)
        offsets = (tl.dot(ones, scaled, sums[1], input_precision="ieee"),)
    else:
        scales, zeros = level_params(params, left, GROUPS, PARTIAL, kind)
        values = tl.permute(tl.reshape(values, [GROUPS, D // GROUPS, 64]), (1, 2, 0))
        parts = columns_of(tl.reshape(values, [D // GROUPS * 64, GROUPS]), GROUPS)
        for group in tl.static_range(GROUPS):
            part = tl.reshape(parts[group], [D // GROUPS, 64])
            scaled = weights * scales[group]
            found = found + (tl.dot(part, right_side(scaled), sums[group], input_precision="ieee"),)
            shifted = (scaled if params.dtype.element_ty == tl.uint8 else weights) * zeros[group]
            offsets = offsets + (tl.dot(ones, right_side(shifted), sums[GROUPS + group], input_precision="ieee"),)
    plain = tl.reshape(tl.permute(weights, (0, 4, 5, 3, 6, 1, 2)), [64, NT * 8])
    return found + offsets + (tl.dot(ones, plain, sums[2 * GROUPS], input_precision="ieee"),)


@triton.jit(do_not_specialize=["cut", "capacity", "columns", "splits"])
def sum_values(
    # codes [B, H, C, w] uint8; value_params [B, H, C, 2, D/gv], or [B, H, C, 1, 1] in the trellis code; kept logits and
    # their base (`kept_logits.py`), logits of tokens in the slots -inf; lse [B, Hq, lanes] float32; cursor int64 [B, 4].
    codes, value_params, logits, base, lse, cursor,
    # Written: partial [B·H, splits, ALL_ROWS, D], peaks and totals [B·H, splits, ALL_ROWS] float32.
    partial, peaks, totals,
    # log2 of the weights to skip; H; C in tokens; columns of the cursor; number of splits.
    cut, heads, capacity, columns, splits,
    D: tl.constexpr, width: tl.constexpr, bits: tl.constexpr, GROUPS: tl.constexpr, rows: tl.constexpr,
    TRELLIS: tl.constexpr, SKIP: tl.constexpr, NEST: tl.constexpr, PARTIAL: tl.constexpr, ROWS: tl.constexpr,
    ALL_ROWS: tl.constexpr, LOOK: tl.constexpr, PAGED: tl.constexpr, PRMT: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """One program: ROWS of the query rows of a KV head, over a split of its low-bit tier.

    width: w. GROUPS: D / gv. rows: R. SKIP: with `cut`. NEST: see `nested_fields`; 0: one field at a time. PARTIAL: the
    last record may be half full. kind: dtype of products. Bytes per token: D·bits/8 of codes, 2·GROUPS parameters,
    `bytes_of_logit`·R'. FLOPs: 2·ROWS·D.
    """
    NT: tl.constexpr = ROWS // 8
    Q: tl.constexpr = (rows + 1) // 2
    EIGHT: tl.constexpr = value_params.dtype.element_ty == tl.uint8
    # log2 of the units of weights, of scales, of codes, and of zero points.
    LIFT: tl.constexpr = 64 if kind == tl.bfloat16 else 0
    SCALE: tl.constexpr = -16 if EIGHT and kind == tl.bfloat16 else 0
    CODE: tl.constexpr = -133 if kind == tl.bfloat16 else (-24 if kind == tl.float16 else 0)
    ZERO: tl.constexpr = SCALE - 130 if EIGHT and kind == tl.bfloat16 else 0
    bh, split, first_row = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * ROWS
    head = bh % heads
    cursor += bh // heads * columns
    low_bit = tl.load(cursor + AT_LOW_BIT).to(tl.int32)
    count = ((low_bit + 63) // 64 - split + splits - 1) // splits
    first_record = bh * (capacity // 64)
    lse += bh * rows
    codes = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    logits += first_record * (128 * Q)
    base += first_record * (8 * Q)
    # The places of a record's logits [2, NT, g, q, 8] of tokens 16·q + 8·o, and of its bases [NT, g, q].
    i = tl.arange(0, NT * 256)[None, :]
    row = (first_row + i // 32) % rows
    octet = i // 8 % 4 * 2 + tl.arange(0, 2)[:, None]
    logits_at = row % 2 * (64 * Q) + octet * (8 * Q) + row // 2 * 8 + i % 8
    i = tl.arange(0, NT * 32)
    row = (first_row + i // 4) % rows
    base_at = row % 2 * (4 * Q) + i % 4 * Q + row // 2
    row = first_row + tl.arange(0, ROWS)
    reference = tl.load(lse + row % rows)
    if kind == tl.float16:
        highest = tl.full([NT * 32], float("-inf"), tl.float32)
        for number in range(count):
            highest = tl.maximum(highest, tl.load(base + (split + number * splits) * (8 * Q) + base_at))
        reference = tl.maximum(tl.max(tl.reshape(highest, [ROWS, 4]), 1), LOWEST_BASE)
    shift = tl.reshape(reference, [NT, 8]) - LIFT
    sums = ()
    for _ in tl.static_range(GROUPS):
        sums = sums + (tl.zeros([D // GROUPS, ROWS], tl.float32),)
    for _ in tl.static_range(GROUPS + 1):
        sums = sums + (tl.zeros([16, ROWS], tl.float32),)
    if SKIP:  # bases of all rows
        BASES: tl.constexpr = triton.next_power_of_2(8 * Q)
        which = tl.arange(0, BASES) % (8 * Q)
        least = tl.load(lse + (which % Q * 2 + which // (4 * Q)) % rows) + cut
        for start in range(0, count, LOOK):
            number = start + tl.arange(0, LOOK)
            at = base + (split + number * splits)[:, None] * (8 * Q) + which[None, :]
            bases = tl.load(at, (number < count)[:, None], float("-inf"))
            visited = tl.max((bases >= least[None, :]).to(tl.int32), 1)
            visited = tl.sum(visited << tl.arange(0, LOOK), 0)
            for place in range(LOOK):
                if (visited >> place) & 1 != 0:
                    tile = split + (start + place) * splits
                    sums = with_record(
                        sums, tile, codes, value_params, logits + tile * (128 * Q) + logits_at,
                        base + tile * (8 * Q) + base_at, shift, cursor, head, heads, first_record, low_bit,
                        D=D, width=width, bits=bits, GROUPS=GROUPS, TRELLIS=TRELLIS, NEST=NEST, PARTIAL=PARTIAL,
                        PAGED=PAGED, PRMT=PRMT, kind=kind,
                    )  # fmt: skip
    else:
        for number in range(count):
            tile = split + number * splits
            sums = with_record(
                sums, tile, codes, value_params, logits + tile * (128 * Q) + logits_at,
                base + tile * (8 * Q) + base_at, shift, cursor, head, heads, first_record, low_bit,
                D=D, width=width, bits=bits, GROUPS=GROUPS, TRELLIS=TRELLIS, NEST=NEST, PARTIAL=PARTIAL,
                PAGED=PAGED, PRMT=PRMT, kind=kind,
            )  # fmt: skip

    total = tl.max(sums[2 * GROUPS], 0) * 2.0**-LIFT
    at = (bh * splits + split) * ALL_ROWS + row
    tl.store(peaks + at, tl.where(total > 0, reference, float("-inf")))
    tl.store(totals + at, total)
    GROUP: tl.constexpr = D // GROUPS
    i, j = tl.arange(0, GROUP // 8 * NT)[:, None], tl.arange(0, 64)[None, :]
    out_at = ((bh * splits + split) * ALL_ROWS + first_row + i % NT * 8 + j % 8) * D + i // NT * 8 + j // 8
    level_bits: tl.constexpr = 2 if TRELLIS else bits
    INNER: tl.constexpr = 16 if TRELLIS else 8
    for group in tl.static_range(GROUPS):
        channel = group * GROUP + tl.arange(0, GROUP)
        result = sums[group] * 2.0 ** -(LIFT + SCALE + CODE)
        if NEST > 0:
            result = single_sums(result, NEST, INNER)
            result = result / (1 << channel // INNER % (8 // level_bits) * level_bits).to(tl.float32)[:, None]
        offset = tl.max(sums[GROUPS + group], 0)
        if TRELLIS:
            result += (offset * (-1.5 * 2.0 ** -(LIFT + SCALE)))[None, :]
        else:
            result += (offset * 2.0 ** -(LIFT + ZERO))[None, :]
        # In this shape the store's layout is almost that of a product, so that no shared memory is needed.
        result = tl.permute(tl.reshape(result, [GROUP // 8, 8, NT, 8]), (0, 2, 1, 3))
        tl.store(partial + out_at + group * GROUP, tl.reshape(result, [GROUP // 8 * NT, 64]))


def attend_values(inputs: DecodeInputs, logits: Tensor, base: Tensor, lse: Tensor, cut: float | None) -> Sums:
    """Return the sums of the low-bit tier's values, weighted by kept logits.

    Args:
        logits, base: kept logits and their base (`kept_logits.py`), from `triton_keys.attend_keys`; logits of tokens in
            the slots and of sinks are -inf.
        lse: log-sum-exp of all tokens [B, Hq, lanes], in log2 units.
        cut: log2 of the weight below which records are skipped; None or 0 skips none. With n low-bit tokens the output's
            error is below 2 · n · 2^cut of the largest value.
    """
    q, cursor, tiers = inputs.q, inputs.cursor, inputs.tiers
    batch, query_heads, lanes, d = q.shape
    _, heads, capacity = shape_of_scores(tiers.codes, cursor)
    dim, bits, all_rows = stored_dim(d), inputs.layout.value_bits, rows_of(q, heads)
    in_trellis = is_trellis(tiers.value_params)
    rows = min(all_rows, MOST_SUMS // dim)
    parts, groups = all_rows // rows, tiers.value_params.shape[4]
    splits = splits_of(batch * heads * parts, triton.cdiv(capacity, RECORD), q.device, PROGRAMS)
    sums = empty_sums(batch * heads, splits, all_rows, dim, q.device)
    sum_values[batch * heads, splits, parts](
        tiers.codes, tiers.value_params, logits, base, lse, cursor, *sums,
        cut=cut or 0.0, heads=heads, capacity=capacity, columns=cursor.stride(0), splits=splits,
        D=dim, width=tiers.codes.shape[3], bits=bits, GROUPS=groups, rows=query_heads // heads * lanes,
        TRELLIS=in_trellis, SKIP=bool(cut), NEST=nested(dim, bits, in_trellis, dim // groups),
        PARTIAL=group_of(tiers, inputs.layout) < RECORD, ROWS=rows, ALL_ROWS=all_rows, LOOK=LOOK,
        PAGED=has_table(cursor), PRMT=q.is_cuda, kind=KINDS[q.dtype], num_warps=1, num_stages=1,
    )  # fmt: skip
    return sums


def nested(dim: int, bits: int, in_trellis: bool, group: int) -> int:
    """Return NEST: fields of a byte whose numbers share a token and a scale; 0 if fields of a byte are of many tokens.

    group: gv, or D in the trellis code.
    """
    planes = 8 // (2 if in_trellis else bits)
    channels = dim // (16 if in_trellis else 8)
    return min(planes, group // 8) if channels >= planes else 0
