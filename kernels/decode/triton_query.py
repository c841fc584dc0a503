"""Triton: both sides of products of low-bit keys (`records.py`) and q, and what the logits of a group share."""

from __future__ import annotations

import math
from collections import namedtuple

import triton
import triton.language as tl

from specache_compile.kernels.codes.records import PARAM_BLOCK
from specache_compile.kernels.state.triton_center import STEPPED_ROWS
from specache_compile.kernels.state.triton_cursor import AT_LOW_BIT, place_in_page
from specache_compile.kernels.state.triton_pairs import hadamard

from .triton_words import numbers_of, scales_of, zeros_of

BLOCK, LOG2E = tl.constexpr(PARAM_BLOCK), tl.constexpr(math.log2(math.e))
# The value of a float16's lowest bit, in which codes count.
LOWEST_BIT = tl.constexpr(2.0**-24)
# Groups per program.
GROUPS = 64


# What `prepare_query` and `score_keys` are compiled for. dim: D. width: bytes of a token's codes. rows: R; later ones
# of the `padded` rows repeat them. center_rows: rows of the keys' center, or 0. mask, is_capped: as MASK and CAP in
# `triton_logits`. nest: 1 or 0, as in `fields_of`.
Form = namedtuple(
    "Form",
    "dim bits group width lanes rows padded sink_tokens center_rows mask is_capped in_trellis nest",
)


@triton.jit
def power_of_two(exponent):
    """Return 2**exponent for exponents of normal numbers."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["capacity", "columns", "share_blocks"])
def prepare_query(
    # q [B, Hq, lanes, d]; key_params [P, H, 256/g, 2, D], unused without levels; center_shares [B, Hq, lanes,
    # share_blocks · 16] float32, one per group, unused without a stepped center; cursor int64 [B, columns].
    q, key_params, center_shares, cursor,
    # Written: query [B·H, ROWS · D] float16 or float32, in fragment order; unit [B·H, 2, ROWS] float32: what converts a
    # product to log2 units, and -3/2 of a row's sum; shares [B·H, C/g, ROWS] float32, in log2 units.
    query, unit, shares,
    q_strides, scale, heads, capacity, columns, share_blocks,
    d: tl.constexpr, TURNED: tl.constexpr, GROUPS: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """One program: all query rows of a KV head; the first also stores them. Then what GROUPS groups' logits share.

    TURNED: channels that are rotated together, or 1. Bytes per group: 2·D parameters read, 4·ROWS written. FLOPs:
    2·ROWS·D per group.
    """
    D: tl.constexpr = form.dim
    ROWS: tl.constexpr = form.padded
    place_bits: tl.constexpr = 2 if form.in_trellis else form.bits
    is_centered: tl.constexpr = form.center_rows == STEPPED_ROWS
    kind: tl.constexpr = query.dtype.element_ty
    bh, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = bh // heads, bh % heads
    row, channel = tl.arange(0, ROWS), tl.arange(0, D)
    number = row % form.rows
    query_head = head * (form.rows // form.lanes) + number // form.lanes
    at = q + batch * q_strides[0] + query_head * q_strides[1] + number % form.lanes * q_strides[2]
    x = hadamard(tl.load(at[:, None] + channel[None, :], (channel < d)[None, :], 0.0).to(tl.float32), TURNED)
    exponent = (tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) >> 23) - 126
    exponent = tl.minimum(exponent, 126)
    x = (x * power_of_two(-exponent)[:, None]).to(kind).to(tl.float32)
    worth = power_of_two(exponent) * (scale * LOG2E)
    if chunk == 0:
        level: tl.constexpr = LOWEST_BIT if kind == tl.float16 else 1.0
        place = (channel // 16 if form.in_trellis else channel // 8) % (8 // place_bits) * place_bits
        lifted = x * power_of_two(-place)[None, :] if form.nest else x
        LOAD: tl.constexpr = 8 if D >= 32 else 4
        lifted = tl.reshape(lifted, [ROWS // 8, 8, D // (4 * LOAD), LOAD // 2, 4, 2])
        lifted = tl.reshape(tl.permute(lifted, (0, 2, 1, 4, 3, 5)), [ROWS * D])
        tl.store(query + bh * (ROWS * D) + tl.arange(0, ROWS * D), lifted.to(kind))
        tl.store(unit + bh * (2 * ROWS) + row, worth * (1.0 / level))
        tl.store(unit + bh * (2 * ROWS) + ROWS + row, tl.sum(x, 1) * (-1.5 * level))
    if not form.in_trellis or is_centered:
        number = chunk * GROUPS + tl.arange(0, GROUPS)
        cursor += batch * columns
        there = number * form.group < tl.load(cursor + AT_LOW_BIT)
        share = tl.zeros([GROUPS, ROWS], tl.float32)
        if not form.in_trellis:
            token = tl.zeros([GROUPS], tl.int64) + number * form.group
            first = place_in_page(cursor, head, token, heads, there) // form.group
            share = share_of_zeros(key_params + first * (2 * D), there, x, kind, D=D) * worth[None, :]
        if is_centered:
            at = (bh * form.rows + row % form.rows) * (share_blocks * 16)
            share += tl.load(center_shares + at[None, :] + number[:, None], there[:, None], 0.0) * LOG2E
        at = (bh * (capacity // form.group) + number) * ROWS
        tl.store(shares + at[:, None] + row[None, :], share, there[:, None])


@triton.jit
def share_of_zeros(params, there, x, kind: tl.constexpr, D: tl.constexpr):
    """Return Σ zero · x [groups, ROWS] of the groups with parameters at `params` [groups], for rows x [ROWS, D]."""
    B: tl.constexpr = BLOCK if D >= BLOCK else D
    right = tl.reshape(x, [x.shape[0], D // B, B // 16, 2, 4, 2])
    if params.dtype.element_ty == tl.uint8:
        word = tl.arange(0, D // 4)[None, :]
        at = params.to(tl.pointer_type(tl.int32), bitcast=True)[:, None] + word
        scales = scales_of(tl.load(at, there[:, None], 0))
        zeros = zeros_of(tl.load(at + D // 4, there[:, None], 0))
        left = tl.reshape((zeros * scales).to(kind), [params.shape[0], D])
        right = tl.reshape(tl.permute(right, (1, 4, 2, 3, 5, 0)), [D, x.shape[0]]).to(kind)
        share = tl.dot(left, right, input_precision="ieee") * 16.0
    else:
        left = tl.load(params[:, None] + (D + tl.arange(0, D))[None, :], there[:, None], 0.0).to(tl.float32)
        right = tl.reshape(tl.permute(right, (1, 4, 2, 5, 3, 0)), [D, x.shape[0]])
        share = tl.dot(left, right, input_precision="ieee" if kind == tl.float32 else "tf32x3")
    return share


@triton.jit
def scaled_query(query, params, D: tl.constexpr):
    """Return the right side of a product [D, ROWS]: query [NT, D/B, 8, 4, B/16, 2, 2] times a group's scales."""
    B: tl.constexpr = BLOCK if D >= BLOCK else D
    NT: tl.constexpr = query.shape[0]
    kind: tl.constexpr = query.dtype
    if params.dtype.element_ty == tl.uint8:  # a thread loads its channels' bytes, equal for all rows
        i = tl.arange(0, 2 * D)
        words = tl.load(params.to(tl.pointer_type(tl.int32), bitcast=True) + (i // (2 * B) * (B // 4) + i % (B // 4)))
        scales = tl.reshape(scales_of(words).to(kind), [D // B, 8, 4, B // 16, 2, 2])
    else:
        LOAD: tl.constexpr = 8 if B >= 32 else 4
        PARTS: tl.constexpr = B // 4 // LOAD
        i = tl.arange(0, 8 * D)
        at = i // (8 * B) * B + i // (32 * LOAD) % PARTS * LOAD + i // LOAD % 4 * (B // 4) + i % LOAD
        scales = tl.load(params + at).to(tl.float32)
        if kind == tl.float16 and params.dtype.element_ty == tl.bfloat16:
            scales = tl.minimum(scales, 65504.0)
        scales = tl.reshape(scales.to(kind), [D // B, PARTS, 8, 4, LOAD // 4, 2, 2])
        scales = tl.reshape(tl.permute(scales, (0, 2, 3, 1, 4, 6, 5)), [D // B, 8, 4, B // 16, 2, 2])
    found = query * scales[None, :, :, :, :, :, :]
    return tl.reshape(tl.permute(found, (1, 4, 3, 5, 6, 0, 2)), [D, NT * 8])


@triton.jit
def unpacked_keys(words, form: tl.constexpr, kind: tl.constexpr):
    """Return a record's codes as the left side of a product, [64, D] in `kind`; row 8·j + g is token 8·g + j."""
    found = tl.permute(numbers_of(words, form, kind), (0, 3, 4, 1, 2, 5))
    found = tl.permute(tl.reshape(found, [8, form.dim // 16, 2, 8, 4, 2]), (0, 3, 1, 4, 2, 5))
    return tl.reshape(found, [64, form.dim])


@triton.jit
def in_rows(x, ROWS: tl.constexpr):
    """Broadcast [8, 4, 8] by thread (g, q) and token 8·g + j to [ROWS, 8, 8] by row, g and j; it is equal for all q."""
    x = tl.permute(x, (1, 0, 2))[None, :, None, :, :]
    return tl.reshape(tl.broadcast_to(x, [ROWS // 8, 4, 2, 8, 8]), [ROWS, 8, 8])


@triton.jit
def token_scales(params, ROWS: tl.constexpr):
    """Return the scales of a record's tokens in the trellis code, float32 [ROWS, 8, 8] as in `in_rows`."""
    if params.dtype.element_ty == tl.uint8:
        i = tl.arange(0, 64)
        words = tl.load(params.to(tl.pointer_type(tl.int32), bitcast=True) + (i // 8 * 2 + i % 2))
        scales = tl.permute(tl.reshape(scales_of(words), [8, 4, 2, 2, 2]), (0, 1, 2, 4, 3))
    else:
        i = tl.arange(0, 256)
        scales = tl.load(params + (i // 32 * 8 + i % 8))
    return in_rows(tl.reshape(scales.to(tl.float32), [8, 4, 8]), ROWS=ROWS)
