"""Triton: the values' half of attention over the low-bit tier, at 1, 2 and 4 bits; `records.py` has the order of codes.

It reads the logits that the keys' half keeps. Instructions per stored number are the limit, so the loop has no shared
memory, no barrier, and no layout conversion.
"""

# - A program has one warp. A record's words are the left side of a product, channels × tokens, in the registers of the
#   threads that load them. The weights of the query rows, times the tokens' scales, are its columns; with fewer than
#   eight rows, columns repeat them.
# - Codes are 16-bit floats below the normal range, as in `triton_keys`. A row of the product has the codes of one field
#   and of all fields below it in their byte (`fields_of`), which saves an AND per byte: one code's sum is the
#   difference of two rows. Rows of one product must then share their scales, so each group of channels has a product.
# - Products with ones sum the weights, and the weights times zero points; in the trellis code a zero point is -3/2 · s.
# - A weight is 2^(logit - lse), without a running maximum. Products are in bfloat16, whose range holds weights · 2^64,
#   with sums that are normal float32 numbers. float16's range is too small, so its models take bfloat16 too.
# - Split i of n has the records i, i + n, i + 2·n, ..., so that splits of one head skip equally many.
#
# Skipping. With `cut` a record is left out if all its bases are below lse + cut: then each of its tokens has less than
# 2^cut of the attention of each query row. Of n low-bit tokens, those left out have m < n · 2^cut of a row's attention.
# The rest is divided by its own sum: the output is the mean v of the other values, instead of (1 - m)·v + m·v' with the
# mean v' of the values left out. The difference is m · (v - v'), less than 2 · n · 2^cut · max |value| in each channel.
# A base includes tokens in the slots, so a record with such a token may be visited although its other weights are low.
#
# As in `triton_keys`, kWidth determines the order of tokens: 4 for products with codes, 2 for the sum of weights.

from __future__ import annotations

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specache_compile.kernels.attention.kept_logits import row_pairs
from specache_compile.kernels.codes.records import RECORD, stored_dim
from specache_compile.kernels.codes.trellis import is_trellis
from specache_compile.kernels.state.operands import AttentionInputs, TierInputs
from specache_compile.kernels.state.page_table import shape_of_scores
from specache_compile.kernels.state.triton_cursor import AT_LOW_BIT, record_in_page

from .triton_decode import Sums, empty_sums, group_of, rows_of, splits_of
from .triton_words import (
    COMPILED,
    columns_of,
    in_weights_order,
    level_params,
    nested,
    single_sums,
    token_scales,
    unpacked_values,
)

# Registers hold D · ROWS sums; a program has fewer rows at D = 256.
MOST_SUMS = 4096
# Programs per multiprocessor that the registers allow.
PROGRAMS = 20
# Records whose bases are compared with `cut` at once.
LOOK = 16


# What `sum_values` is compiled for. dim: D. width: bytes of a token's codes. groups: D / gv. rows: query rows of a
# program. pairs: R'/2. nest: as in `fields_of`. is_partial: the last record may be half full.
Form = namedtuple("Form", "dim width bits groups rows pairs nest in_trellis is_partial")


@triton.jit
def right_side(weights):
    """Return weights [2, NT, 8, 4, 2, 2, 2] as the right side of a product with codes, [64, ROWS]."""
    return tl.reshape(tl.permute(weights, (0, 4, 3, 5, 6, 1, 2)), [64, weights.shape[1] * 8])


@triton.jit
def by_thread(sums):
    """Flatten sums [n, ROWS], ordered by row // 8, column // 8, column % 2, and thread (row % 8, column % 8 // 2)."""
    N: tl.constexpr = sums.shape[0] // 8
    NT: tl.constexpr = sums.shape[1] // 8
    return tl.reshape(tl.permute(tl.reshape(sums, [N, 8, NT, 4, 2]), (0, 2, 4, 1, 3)), [N * NT * 64])


@triton.jit
def with_record(
    # Sums of values [D/GROUPS, ROWS] of each group of channels, sums of zeros [16, ROWS] of each, and the weights' sum.
    sums, tile,
    # As in `sum_values`, from the head's first record on; what weights are relative to [NT, 8, 4]; places of a record's
    # logits and bases; the row's cursor, the KV head, and the number of low-bit tokens.
    given,
    form: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Return the sums with those of record `tile`."""
    codes, value_params, logits, base, shift, logits_at, base_at, cursor, head, heads, low_bit = given
    NT: tl.constexpr = form.rows // 8
    D: tl.constexpr = form.dim
    GROUPS: tl.constexpr = form.groups
    number, left = record_in_page(cursor, head, tile, heads), low_bit - tile * 64
    logits = logits + tile * (128 * form.pairs) + logits_at
    words = tl.load(codes + number * (16 * form.width) + tl.arange(0, 2 * D * form.bits))
    params = value_params + number * (64 if form.in_trellis else 128 * GROUPS)
    if form.is_partial:
        here = tl.arange(0, NT * 256) // 8 % 4 * 16 < left
        above = tl.load(logits, tl.broadcast_to(here[None, :], [2, NT * 256]), float("-inf"))
    else:
        above = tl.load(logits)
    over = tl.reshape(tl.load(base + tile * (8 * form.pairs) + base_at), [NT, 8, 4]) - shift
    above = tl.reshape(above.to(tl.float32), [2, NT, 8, 4, 8])
    weights = tl.reshape(tl.exp2(above + over[None, :, :, :, None]).to(kind), [2, NT, 8, 4, 2, 2, 2])
    values = tl.reshape(unpacked_values(words, form, kind), [GROUPS, D // GROUPS, 64])
    parts = columns_of(tl.reshape(tl.permute(values, (1, 2, 0)), [D // GROUPS * 64, GROUPS]), GROUPS)
    ones = tl.full([16, 64], 1.0, tl.float32).to(kind)
    if form.in_trellis:
        scales = (token_scales(params, left, form.is_partial, kind),)
    else:
        scales, zeros = level_params(params, left, GROUPS, form.is_partial, kind)
    found, offsets = (), ()
    for group in tl.static_range(GROUPS):
        scaled = weights * in_weights_order(scales[group])
        part = tl.reshape(parts[group], [D // GROUPS, 64])
        found = found + (tl.dot(part, right_side(scaled), sums[group], input_precision="ieee"),)
        shifted = scaled
        if not form.in_trellis:
            shifted = (scaled if params.dtype.element_ty == tl.uint8 else weights) * in_weights_order(zeros[group])
        offsets = offsets + (tl.dot(ones, right_side(shifted), sums[GROUPS + group], input_precision="ieee"),)
    plain = tl.reshape(tl.permute(weights, (0, 4, 5, 3, 6, 1, 2)), [64, NT * 8])
    return found + offsets + (tl.dot(ones, plain, sums[2 * GROUPS], input_precision="ieee"),)


@triton.jit(do_not_specialize=["capacity", "columns", "splits"])
def sum_values(
    # codes [P, H, 256, w] uint8; value_params [P, H, 256, 2, D/gv], or [P, H, 256, 1, 1] in the trellis code; kept
    # logits and their base (`kept_logits.py`), -inf for tokens in the slots; lse [B, Hq, lanes] float32; cursor int64
    # [B, columns].
    codes, value_params, logits, base, lse, cursor,
    # Written: partial [B·H, splits, ALL_ROWS, D], peaks and totals [B·H, splits, ALL_ROWS] float32.
    partial, peaks, totals,
    # log2 of the weights to skip, or None; H; C in tokens; columns of the cursor; number of splits.
    cut, heads, capacity, columns, splits,
    form: tl.constexpr, rows: tl.constexpr, ALL_ROWS: tl.constexpr, LOOK: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """One program: some query rows of a KV head, over a split of its low-bit tier.

    form: a `Form`. rows: R. LOOK: records whose bases are compared with `cut` at once. kind: dtype of products. Bytes
    per token: D·bits/8 of codes, 2·GROUPS parameters, `bytes_of_logit`·R'. FLOPs: 2·ROWS·D.
    """
    ROWS: tl.constexpr = form.rows
    NT: tl.constexpr = ROWS // 8
    D: tl.constexpr = form.dim
    GROUPS: tl.constexpr = form.groups
    Q: tl.constexpr = form.pairs
    TRELLIS: tl.constexpr = form.in_trellis
    EIGHT: tl.constexpr = value_params.dtype.element_ty == tl.uint8
    # log2 of the units of weights, of scales, of codes, and of zero points.
    LIFT: tl.constexpr = 64 if kind == tl.bfloat16 else 0
    SCALE: tl.constexpr = -16 if EIGHT and kind == tl.bfloat16 else 0
    CODE: tl.constexpr = -133 if kind == tl.bfloat16 else 0
    ZERO: tl.constexpr = SCALE - 130 if EIGHT and kind == tl.bfloat16 else 0
    UNIT: tl.constexpr = -1.5 * 2.0 ** -(LIFT + SCALE) if TRELLIS else 2.0 ** -(LIFT + ZERO)
    bh, split, first_row = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * ROWS
    head = (bh % heads).to(tl.int32)
    cursor += bh // heads * columns
    low_bit = tl.load(cursor + AT_LOW_BIT).to(tl.int32)
    tiles = (low_bit + 63) // 64
    first_record = bh * (capacity // 64)
    lse += bh * rows
    codes = codes.to(tl.pointer_type(tl.int32), bitcast=True) + (16 * form.width - 2 * D * form.bits)
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
    reference = tl.load(lse + row)
    shift = tl.reshape(reference, [NT, 8, 4]) - LIFT
    sums = ()
    for _ in tl.static_range(GROUPS):
        sums = sums + (tl.zeros([D // GROUPS, ROWS], tl.float32),)
    for _ in tl.static_range(GROUPS + 1):
        sums = sums + (tl.zeros([16, ROWS], tl.float32),)
    if cut is not None:  # bases of all rows
        BASES: tl.constexpr = triton.next_power_of_2(8 * Q)
        which = tl.arange(0, BASES) % (8 * Q)
        least = tl.load(lse + (which % Q * 2 + which // (4 * Q)) % rows) + cut
    given = (codes, value_params, logits, base, shift, logits_at, base_at, cursor, head, heads, low_bit)
    for start in range(split, tiles, splits * LOOK):
        if cut is not None:
            looked = start + tl.arange(0, LOOK) * splits
            at = base + looked[:, None] * (8 * Q) + which[None, :]
            bases = tl.load(at, (looked < tiles)[:, None], float("-inf"))
            found = tl.max((bases >= least[None, :]).to(tl.int32), 1)
            found = tl.sum(found << tl.arange(0, LOOK), 0)
        for place in range(LOOK):
            visited = True
            if cut is not None:
                visited = (found >> place) & 1 != 0
            if visited:
                sums = with_record(sums, start + place * splits, given, form, kind)

    # In these shapes the stores' layouts are those of the loads and of a product: no shared memory is needed.
    first = (bh * splits + split) * ALL_ROWS + first_row
    there = (reference < float("inf")) & (split < tiles)
    tl.store(peaks + first + tl.arange(0, NT * 32) // 4, tl.where(there, reference, float("-inf")))
    i, j = tl.arange(0, NT * 128) // 32, tl.arange(0, NT * 128) % 32
    total = by_thread(sums[2 * GROUPS]) * 2.0**-LIFT  # the sums with ones have equal rows
    tl.store(totals + first + i // 2 * 8 + j * 2 + i % 2, total, (i < 2 * NT) & (j < 4))
    GROUP: tl.constexpr = D // GROUPS
    i, j = tl.arange(0, GROUP * ROWS) // 32, tl.arange(0, GROUP * ROWS) % 32
    out_at = (first + i // 2 % NT * 8 + j % 4 * 2 + i % 2) * D + i // (2 * NT) * 8 + j // 4
    level_bits: tl.constexpr = 2 if TRELLIS else form.bits
    INNER: tl.constexpr = 16 if TRELLIS else 8
    for group in tl.static_range(GROUPS):
        channel = group * GROUP + tl.arange(0, GROUP)
        result = sums[group] * 2.0 ** -(LIFT + SCALE + CODE)
        if form.nest > 0:
            result = single_sums(result, form.nest, INNER)
            result = result / (1 << channel // INNER % (8 // level_bits) * level_bits).to(tl.float32)[:, None]
        result += (tl.max(sums[GROUPS + group], 0) * UNIT)[None, :]
        tl.store(partial + out_at + group * GROUP, by_thread(result))


def attend_values(
    new: AttentionInputs, read: TierInputs, kept: tuple[Tensor, Tensor], lse: Tensor, cut: float | None
) -> Sums:
    """Return the sums of the low-bit tier's values, weighted by kept logits relative to lse [B, Hq, lanes].

    cut: log2 of the weight below which records are skipped; None skips none.
    """
    q, cursor, tiers = new.q, new.cursor, read.tiers
    batch, query_heads, lanes, d = q.shape
    whole = q.dtype == torch.float32 or (q.dtype == torch.float16 and not COMPILED.value)
    _, heads, capacity = shape_of_scores(tiers.codes, cursor)
    dim, bits, all_rows = stored_dim(d), read.layout.value_bits, rows_of(q, heads)
    in_trellis = is_trellis(tiers.value_params)
    rows = min(all_rows, MOST_SUMS // dim)
    parts, groups = all_rows // rows, tiers.value_params.shape[4]
    splits = splits_of(batch * heads * parts, triton.cdiv(capacity, RECORD), q.device, PROGRAMS)
    sums = empty_sums(batch * heads, splits, all_rows, dim, q.device)
    form = Form(
        dim, tiers.codes.shape[3], bits, groups, rows, row_pairs(q, heads),
        nested(dim, bits, in_trellis, dim // groups), in_trellis, group_of(tiers) < RECORD,
    )  # fmt: skip
    sum_values[batch * heads, splits, parts](
        tiers.codes, tiers.value_params, *kept, lse, cursor, *sums,
        cut=cut, heads=heads, capacity=capacity, columns=cursor.stride(0), splits=splits,
        form=form, rows=query_heads // heads * lanes, ALL_ROWS=all_rows, LOOK=1 if cut is None else LOOK,
        kind=tl.float32 if whole else tl.bfloat16, num_warps=1, num_stages=1,
    )  # fmt: skip
    return sums
