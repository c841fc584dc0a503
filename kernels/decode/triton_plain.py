"""Triton: attention over tiers that are rows of tokens: pairs in the model's dtype, codes of 8 bits, e4m3 codes.

Tokens are the columns of both products, query rows the rows, so that both tiles are loaded as they are stored.
"""

# attend_rows (B·H, splits) has three modes: keys alone write kept logits (`kept_logits.py`), values alone read them,
# both together need none. Numbers are converted to a product's dtype, codes of 8 bits to code · scale + zero. e4m3
# codes are exact in float16, so bfloat16 models use it for them, and a query row is divided by a power of two.

from __future__ import annotations

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specache_compile.kernels.attention.kept_logits import LOGIT_BLOCK, LOWEST
from specache_compile.kernels.attention.triton_logits import LOG2E, finite, place_of_base, place_of_logit, visible
from specache_compile.kernels.codes.records import RECORD, stored_dim
from specache_compile.kernels.codes.triton_levels import from_e4m3, read_scale, read_zero
from specache_compile.kernels.state.layout import rotated
from specache_compile.kernels.state.operands import AttentionInputs, TierInputs
from specache_compile.kernels.state.page_table import shape_of_scores
from specache_compile.kernels.state.triton_center import share_of_center
from specache_compile.kernels.state.triton_cursor import AT_LENGTH, AT_LOW_BIT, place_in_page
from specache_compile.kernels.state.triton_pairs import sinks_among

from .triton_decode import MASK_STRIDES, Sums, empty_sums, group_of, mask_form, rows_of, splits_of

TOKENS, BLOCK, LEAST = (tl.constexpr(size) for size in (RECORD, LOGIT_BLOCK, LOWEST))
# Kinds of rows: pairs in q's dtype; 8-bit codes with parameters; e4m3 codes, converted by arithmetic or natively.
PAIRS, LEVELS, E4M3, NATIVE = (tl.constexpr(kind) for kind in range(4))
# Weights are at most 1. Multiplied by this, those of a long context are normal numbers in float16.
LIFT = tl.constexpr(2.0**15)
HAS_E4M3 = 8, 9  # the first devices that convert e4m3 codes
# Warps of a program; programs of a multiprocessor; e4m3 pairs and channels of the largest tile.
WARPS, PROGRAMS, E4M3_TILE, MOST_CHANNELS = 4, 3, 2 * RECORD, 128


# What `attend_rows` is compiled for. dim, group, value_group: D, g and gv. rows: R; later ones of the `padded` rows
# repeat them. width: elements of a token in a record. kind: one of the kinds above. tile: tokens per product; keys
# are of one group. mask, is_capped: as MASK and CAP in `triton_logits`.
Form = namedtuple(
    "Form",
    "d dim group value_group lanes rows padded sink_tokens width kind tile has_values mask is_capped",
)


@triton.jit
def load_keys(at, params, inside, kind: tl.constexpr, d: tl.constexpr, KIND: tl.constexpr):
    """Load keys [tokens, d] of one group in `kind`. at: pointers; params: the group's scale|zero [2, d]."""
    keys = tl.load(at, inside[None, :], 0)
    if KIND == LEVELS:
        channel = tl.arange(0, d)
        scale = read_scale(tl.load(params + channel, inside, 0))
        zero = read_zero(tl.load(params + d + channel, inside, 0), scale)
        keys = keys.to(tl.float32) * scale[None, :] + zero[None, :]
    elif KIND >= E4M3:
        keys = from_e4m3(keys, KIND == NATIVE)
    return keys.to(kind)


@triton.jit
def load_values(
    at, params, there, inside, kind: tl.constexpr, d: tl.constexpr, value_group: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Load values [tokens, d] in `kind`, 0 for tokens that are not `there`. params: their scale|zero [tokens, 2, n]."""
    values = tl.load(at, there[:, None] & inside[None, :], 0)
    if KIND == LEVELS:
        groups: tl.constexpr = d // value_group
        number = tl.arange(0, there.shape[0])[:, None] * (2 * groups) + tl.arange(0, groups)[None, :]
        scale = read_scale(tl.load(params + number, there[:, None], 0))
        zero = read_zero(tl.load(params + groups + number, there[:, None], 0), scale)
        values = tl.reshape(values, [there.shape[0], groups, value_group]).to(tl.float32)
        values = tl.reshape(values * scale[:, :, None] + zero[:, :, None], [there.shape[0], d])
    elif KIND >= E4M3:
        values = from_e4m3(values, KIND == NATIVE)
    return values.to(kind)


@triton.jit
def keep(logits, kept, base, start, low_bit, PAIRS: tl.constexpr):
    """Store a head's logits [ROWS, tokens] from token `start` on, above the largest of each 16."""
    blocks: tl.constexpr = logits.shape[1] // BLOCK
    row = tl.arange(0, logits.shape[0])[:, None]
    logits = tl.reshape(logits, [logits.shape[0], blocks, BLOCK])
    highest = tl.maximum(tl.max(logits, 2), LEAST)
    token = start + tl.arange(0, blocks)[None, :] * BLOCK
    there = (token < low_bit) & (row < 2 * PAIRS)
    tl.store(base + place_of_base(token // BLOCK, row, PAIRS), highest, there)
    at = place_of_logit(token[:, :, None] + tl.arange(0, BLOCK)[None, None, :], row[:, :, None], PAIRS)
    tl.store(kept + at, (logits - highest[:, :, None]).to(kept.dtype.element_ty), there[:, :, None])


@triton.jit(do_not_specialize=[*MASK_STRIDES, "capacity", "columns", "splits"])
def attend_rows(
    # q [B, Hq, lanes, d], rotated if the rows are; mask [B, Hq, lanes, > n] uint8 or additive, or none; cursor int64
    # [B, columns].
    q, mask, cursor,
    # codes [P, H, 256, w]; for LEVELS, key_params [P, H, 256/g, 2, D] and value_params [P, H, 256, 2, D/gv]; for e4m3
    # codes, the key and the value of the new pair [B, H, 1, d] instead.
    codes, key_params, value_params,
    # sink_index [B, 1, S] int32; shares of the center [B, Hq, lanes, C], or None; lse [B·H, R] in log2 units, or None
    # with keys; `kept_logits.based_logits`, or None with keys and values.
    sink_index, shares, lse, kept, base,
    # Written: a `Sums`, in log2 units.
    sums,
    m_batch, m_head, m_row, m_token, scale, softcap,
    # log2 of the weight below which a record's values are skipped, or None; H; C; columns of the cursor.
    cut, heads, capacity, columns, splits,
    form: tl.constexpr,
):  # fmt: skip
    """One program: all query rows of a KV head, over a split of its tokens, and in the first split of e4m3 codes over
    the new pair. Logits of sinks are -inf.

    Bytes per token: 2·width, or half of that and kept logits. FLOPs: 4·ROWS·D, or half.
    """
    d: tl.constexpr = form.d
    D: tl.constexpr = form.dim
    KIND: tl.constexpr = form.kind
    TILE: tl.constexpr = form.tile
    ROWS: tl.constexpr = form.padded
    lanes: tl.constexpr = form.lanes
    rows: tl.constexpr = form.rows
    # Elements of a row, and from a key to its value.
    WIDTH: tl.constexpr = D if KIND == LEVELS else form.width
    TO_VALUE: tl.constexpr = TOKENS * (form.width - D) if KIND == LEVELS else d
    bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch = bh // heads
    cursor += batch * columns
    count = tl.load(cursor + (AT_LENGTH if KIND >= E4M3 else AT_LOW_BIT)).to(tl.int32)
    row = tl.arange(0, ROWS) % rows
    every = (row >= 0)[:, None]
    channel = tl.arange(0, D)
    inside = channel < d
    exact: tl.constexpr = q.dtype.element_ty
    precision: tl.constexpr = "ieee" if exact == tl.float32 else "tf32"
    kind: tl.constexpr = tl.float16 if KIND >= E4M3 and exact == tl.bfloat16 else exact
    lift: tl.constexpr = LIFT if kind == tl.float16 else 1.0
    PAIRS: tl.constexpr = (rows + 1) // 2
    if kept is not None:
        kept += bh * capacity * (2 * PAIRS)
        base += bh * (capacity // BLOCK) * (2 * PAIRS)
    if lse is None:
        query = tl.load(q + (bh * rows + row)[:, None] * d + channel[None, :], inside[None, :], 0.0)
        worth = tl.full([ROWS], 1.0, tl.float32) * scale
        if kind != exact:
            largest = tl.max(tl.abs(query.to(tl.float32)), 1)
            power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            unit = tl.where(power > 0.0, power, 1.0)
            query, worth = query.to(tl.float32) / unit[:, None], worth * unit
        query = query.to(kind)
        mask += batch * m_batch
        mask_row = (bh % heads * (rows // lanes) + row // lanes) * m_head + row % lanes * m_row
    else:
        least = tl.load(lse + bh * rows + row)
    summed = tl.zeros([ROWS, D], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if KIND >= E4M3:
        new_key = tl.load(key_params + bh * d + channel, inside, 0.0).to(tl.float32)
        new_value = tl.load(value_params + bh * d + channel, inside, 0.0).to(tl.float32)
        logit = tl.sum(query.to(tl.float32) * new_key[None, :], 1)[:, None] * worth[:, None]
        here, column = tl.arange(0, 1) + split == 0, (tl.arange(0, 1) + count) * m_token
        logit = visible(logit, softcap, mask, mask_row, column, here, every, form.mask, form.is_capped)
        peak = tl.reshape(logit, [ROWS]) * LOG2E
        total = tl.where(peak > float("-inf"), 1.0, 0.0)
        summed = total[:, None] * (new_value * lift)[None, :]
    tiles = (count + TILE - 1) // TILE
    share = tl.cdiv(tiles, splits)
    for tile in range(split * share, tl.minimum(tiles, (split + 1) * share)):
        start = tile * TILE
        token = start + tl.arange(0, TILE)
        there = token < count
        place = tl.zeros([], tl.int64) + start
        first = place_in_page(cursor, bh % heads, place, heads, place >= 0)
        at = codes + first // TOKENS * (TOKENS * form.width) + (first % TOKENS + tl.arange(0, TILE))[:, None] * WIDTH
        at += channel[None, :]
        shrink = tl.full([ROWS], 1.0, tl.float32)
        if lse is None:
            keys = load_keys(at, key_params + first // form.group * (2 * D), inside, kind=kind, d=D, KIND=KIND)
            logits = tl.dot(query, tl.trans(keys), input_precision=precision) * worth[:, None]
            if shares is not None:
                logits += tl.load(shares + (bh * rows + row)[:, None] * capacity + token[None, :])
            seen = there
            if form.sink_tokens > 0:
                seen &= ~sinks_among(token, sink_index + batch * form.sink_tokens, sink_tokens=form.sink_tokens)
            logits = visible(logits, softcap, mask, mask_row, token * m_token, seen, every, form.mask, form.is_capped)
            logits *= LOG2E
            if kept is not None:
                keep(logits, kept, base, start, count, PAIRS=PAIRS)
            higher = tl.maximum(peak, tl.max(logits, 1))
            weights = tl.exp2(logits - finite(higher)[:, None])
            shrink = tl.exp2(peak - finite(higher))
            peak = higher
        else:
            at_row, at_token = row[:, None], token[None, :]
            above = tl.load(kept + place_of_logit(at_token, at_row, PAIRS), there[None, :], float("-inf"))
            bases = tl.load(base + place_of_base(at_token // BLOCK, at_row, PAIRS), there[None, :], 0.0)
            logits = above.to(tl.float32) + (bases - least[:, None])
            weights = tl.exp2(logits)
        visited = True
        if cut is not None:
            visited = tl.max(tl.max(logits, 1), 0) >= cut
        if visited:
            total = total * shrink + tl.sum(weights, 1)
            if form.has_values:
                values = load_values(
                    at + TO_VALUE, value_params + first * (2 * D // form.value_group), there, inside, kind=kind,
                    d=D, value_group=form.value_group, KIND=KIND,
                )  # fmt: skip
                lifted = (weights * lift).to(kind)
                summed = tl.dot(lifted, values, summed * shrink[:, None], input_precision=precision)
    at = (bh * splits + split) * ROWS + tl.arange(0, ROWS)
    if form.has_values:
        tl.store(sums.partial + at[:, None] * D + channel[None, :], summed * (1.0 / lift))
    if lse is not None:
        peak = tl.where(total > 0.0, least, float("-inf"))
    tl.store(sums.peaks + at, peak)
    tl.store(sums.totals + at, total)


def attend(
    new: AttentionInputs, read: TierInputs, kept: tuple[Tensor, Tensor] | None = None, shares: Tensor | None = None,
    lse: Tensor | None = None, cut: float | None = None,
) -> Sums:  # fmt: skip
    """Launch `attend_rows`; returns the sums over the tier's tokens, without values for keys alone.

    Args:
        new: q is contiguous, and rotated if the rows are.
        read: e4m3 codes [P, H, 256, 2·d] have the new pairs, one for each head and contiguous, in place of parameters.
        kept: kept logits and their base. Keys alone write them, without sinks; with lse [B, Hq, lanes], values alone
            read them and are weighted relative to it. None: e4m3 keys and values are read at once.
        shares: the center's shares of the keys' logits.
        cut: log2 of the weight below which a record is skipped if all its weights are; None to skip none.
    """
    values = kept is None or lse is not None
    q, cursor, tiers, (mask_kind, mask, strides) = new.q, new.cursor, read.tiers, mask_form(new.mask, new.q)
    (batch, query_heads, lanes, d), (codes, key_params, value_params) = q.shape, tiers[:3]
    _, heads, capacity = shape_of_scores(codes, cursor)
    dim, width, padded, levels = stored_dim(d), codes.shape[3], rows_of(q, heads), read.layout.is_quantised
    whole = not levels and codes.dtype.itemsize == 1
    native = whole and codes.is_cuda and torch.cuda.get_device_capability(codes.device) >= HAS_E4M3
    row_kind = LEVELS if levels else NATIVE if native else E4M3 if whole else PAIRS
    group = group_of(tiers) if levels else RECORD
    tile = E4M3_TILE if whole and dim <= MOST_CHANNELS else RECORD if values else min(RECORD, group)
    splits = splits_of(batch * heads, capacity // tile, q.device, PROGRAMS)
    sums = empty_sums(batch * heads, splits, padded, dim if values else 0, q.device)
    form = Form(
        d=d, dim=dim, group=group, value_group=dim // value_params.shape[-1] if levels and values else dim, lanes=lanes,
        rows=query_heads // heads * lanes, padded=padded, sink_tokens=tiers.sink_index.shape[2], width=width,
        kind=row_kind.value, tile=tile, has_values=values, mask=mask_kind, is_capped=read.softcap is not None,
    )  # fmt: skip
    attend_rows[batch * heads, splits](
        q, mask, cursor, codes, key_params, value_params, tiers.sink_index, shares, lse, *(kept or (None, None)), sums,
        **strides, scale=read.scale, softcap=read.softcap or 1.0, cut=cut, heads=heads, capacity=capacity,
        columns=cursor.stride(0), splits=splits, form=form, num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    return sums


def attend_keys(new: AttentionInputs, read: TierInputs, kept: tuple[Tensor, Tensor]) -> Sums:
    """Write the kept logits of the low-bit tier's tokens, without sinks; returns their sums, which have no values."""
    q, tiers = new.q, read.tiers
    turned, shares = rotated(q).to(q.dtype) if read.layout.is_rotated else q.contiguous(), None
    if tiers.center.shape[2]:
        capacity = shape_of_scores(tiers.codes, new.cursor)[2]
        shares = share_of_center(q, tiers.center, new.cursor, capacity, group_of(tiers), read.scale)
    return attend(new._replace(q=turned), read, kept, shares)
