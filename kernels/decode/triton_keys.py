"""Triton: the keys' half of attention over the low-bit tier, at 1, 2 and 4 bits; `records.py` has the order of codes.

Instructions per stored number are the limit, not bytes (tools/compile_kernels.py counts them). So the loop has no
shared memory, no barrier, and no layout conversion.
"""

# prepare_query   (B·H, C/g / GROUPS)   `triton_query`: q in fragment order; what each group's logits share
# score_keys      (B·H, splits)         the kept logits of all rows, and their sums
#
# - A program has one warp. A record's words are the left side of a product, tokens × channels, in the registers of the
#   threads that load them. The query rows are its columns, eight in a tensor core instruction; other rows repeat them.
# - One AND leaves the numbers of one field in both halves of a word: float16 below the normal range, code · 2^(place -
#   24), which tensor cores support. q is divided by 2^place, and by a power of two of its row, which `unit` restores.
# - What a group's tokens share, Σ q·zero and a stepped center's share, shifts only the base of their logits.
# - A thread has eight adjacent tokens, and a peak and a total of its own until the end.
#
# Triton reads the left side in an order of channels that its choice of kWidth determines (4 here): the lowest bit of m
# is next to k0, and q's two bits are above both. With another choice, operands would go through shared memory. Triton
# gives all loads and stores of one shape the same width, so the logits' store is two-dimensional.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specache_compile.kernels.attention.kept_logits import LOWEST
from specache_compile.kernels.attention.triton_logits import LOG2E, capped
from specache_compile.kernels.codes.records import PARAM_BLOCK, RECORD, stored_dim
from specache_compile.kernels.codes.trellis import is_trellis
from specache_compile.kernels.decode.triton_query import (
    GROUPS,
    Form,
    in_rows,
    prepare_query,
    scaled_query,
    token_scales,
    unpacked_keys,
)
from specache_compile.kernels.state.center import ROWS as CENTER_ROWS
from specache_compile.kernels.state.center import STEPPED
from specache_compile.kernels.state.layout import rotation_block
from specache_compile.kernels.state.operands import AttentionInputs, TierInputs
from specache_compile.kernels.state.page_table import shape_of_scores
from specache_compile.kernels.state.triton_center import share_of_center
from specache_compile.kernels.state.triton_cursor import AT_LOW_BIT, record_in_page

from .triton_decode import MASK_STRIDES, Sums, empty_sums, group_of, mask_form, rows_of, splits_of
from .triton_words import nested

NOTHING_SEEN, BLOCK, PER_TOKEN = tl.constexpr(LOWEST), tl.constexpr(PARAM_BLOCK), tl.constexpr(CENTER_ROWS)
# Programs per multiprocessor that the registers allow.
PROGRAMS = 16


@triton.jit
def thread_places(ROWS: tl.constexpr, LOAD: tl.constexpr):
    """Return row and token of a record's numbers by row and token, [1, ROWS · 64]; a thread loads LOAD at a time."""
    i = tl.arange(0, ROWS * 64)[None, :]
    part = i // (32 * LOAD)
    row = part // (16 // LOAD) * 8 + i // LOAD % 4 * 2 + part // (8 // LOAD) % 2
    return row, i // (4 * LOAD) % 8 * 8 + part % (8 // LOAD) * LOAD + i % LOAD


@triton.jit
def from_threads(x, ROWS: tl.constexpr, LOAD: tl.constexpr):
    """Permute what is loaded from `thread_places` to [ROWS, 8, 8]: row, g, j."""
    x = tl.reshape(x, [ROWS // 8, 2, 8 // LOAD, 8, 4, LOAD])
    return tl.reshape(tl.permute(x, (0, 4, 1, 3, 2, 5)), [ROWS, 8, 8])


@triton.jit
def in_pairs(top, ROWS: tl.constexpr):
    """Repeat what blocks of 16 tokens share [ROWS, 4] for their g, [ROWS, 8]."""
    return tl.reshape(tl.broadcast_to(top[:, :, None], [ROWS, 4, 2]), [ROWS, 8])


@triton.jit(do_not_specialize=[*MASK_STRIDES, "capacity", "columns", "share_blocks", "splits"])
def score_keys(
    # query, unit and shares of `prepare_query`; token_shares [B, Hq, lanes, share_blocks · 16] float32, read if the
    # center has PER_TOKEN rows; codes [P, H, 256, w] uint8; key_params [P, H, 256/g, 2, D], or [P, H, 256/g, 1, g] in
    # the trellis code.
    query, unit, shares, token_shares, codes, key_params,
    # As in `triton_decode.score_tokens`.
    mask, cursor, sink_index,
    # Written: `kept_logits.based_logits`; peaks and totals [B·H, splits, ROWS] float32, in log2 units.
    logits, base, peaks, totals,
    m_batch, m_head, m_row, m_token, softcap, heads, capacity, columns, share_blocks, splits, form: tl.constexpr,
):  # fmt: skip
    """One program: all query rows of a KV head, over a split of its low-bit tier. Logits of sinks are -inf.

    form: a `triton_query.Form`. Bytes per token: D·bits/8 of codes, 2·D/g parameters, `bytes_of_logit`·R' written.
    FLOPs: 2·ROWS·D.
    """
    D: tl.constexpr = form.dim
    ROWS: tl.constexpr = form.padded
    B: tl.constexpr = BLOCK if D >= BLOCK else D
    NT: tl.constexpr = ROWS // 8
    Q: tl.constexpr = (form.rows + 1) // 2
    LOAD: tl.constexpr = 2 if D >= 32 else 1
    SHARED: tl.constexpr = not form.in_trellis or (form.center_rows > 0 and form.center_rows != PER_TOKEN)
    IN_LOG2: tl.constexpr = form.in_trellis or form.is_capped or form.mask == 2 or form.center_rows == PER_TOKEN
    bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = bh // heads, (bh % heads).to(tl.int32)
    cursor += batch * columns
    low_bit = tl.load(cursor + AT_LOW_BIT).to(tl.int32)
    tiles = (low_bit + 63) // 64
    share = tl.cdiv(tiles, splits)
    begin, end = split * share, tl.minimum(tiles, (split + 1) * share)
    row = tl.arange(0, ROWS)
    x = tl.load(query + bh * (ROWS * D) + tl.arange(0, ROWS * D))
    x = tl.reshape(x, [NT, D // B, B // (16 * LOAD), 8, 4, LOAD, 2, 2])
    x = tl.reshape(tl.permute(x, (0, 1, 3, 4, 2, 5, 6, 7)), [NT, D // B, 8, 4, B // 16, 2, 2])
    logits += (bh * (capacity // 64) + begin) * (128 * Q)
    base += (bh * (capacity // 64) + begin) * (8 * Q)
    shares += bh * (capacity // form.group) * ROWS
    worth = tl.load(unit + bh * (2 * ROWS) + row)
    offset = tl.load(unit + bh * (2 * ROWS) + ROWS + row)
    codes = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    mask += batch * m_batch
    if form.mask == 1 or form.mask == 2:
        mask_rows, mask_token = thread_places(ROWS, 1)
        mask_rows = mask_rows % form.rows
        query_heads = bh % heads * (form.rows // form.lanes) + mask_rows // form.lanes
        mask_at = query_heads * m_head + mask_rows % form.lanes * m_row + mask_token * m_token
    if form.center_rows == PER_TOKEN:
        share_row, share_token = thread_places(ROWS, 4)
        token_shares += (bh * form.rows + share_row % form.rows) * (share_blocks * 16) + share_token
    # A record's logits [2, NT, g, q, j] and bases [2, NT, block, q].
    i = tl.arange(0, NT * 256)[None, :]
    pair = i // 256 * 4 + i // 8 % 4
    kept = pair < Q
    logits_at = tl.arange(0, 2)[:, None] * (64 * Q) + i // 32 % 8 * (8 * Q) + pair * 8 + i % 8
    i = tl.arange(0, NT * 32)
    base_pair = i // 16 % NT * 4 + i % 4
    base_kept = base_pair < Q
    base_at = i // (NT * 16) * (4 * Q) + i // 4 % 4 * Q + base_pair
    peak = tl.full([ROWS, 8], -1e30, tl.float32)
    total = tl.zeros([ROWS, 8], tl.float32)
    last = -1
    if form.sink_tokens > 0:
        sink_index += batch * form.sink_tokens
        for place in range(form.sink_tokens):
            last = tl.maximum(last, tl.load(sink_index + place) >> 6)
    for tile in range(begin, end):
        number = record_in_page(cursor, head, tile, heads)
        words = tl.load(codes + number * (16 * form.width) + tl.arange(0, 2 * D * form.bits))
        keys = unpacked_keys(words, form, query.dtype.element_ty)
        within = tl.arange(0, 8)[:, None] * 8 + tl.arange(0, 8)[None, :] + tile * 64  # [g, j]
        # The second half of the last record may have no tokens.
        later = (tile * 64 + 32 < low_bit).to(tl.int32) if form.group == 32 else 0
        if form.in_trellis:
            right = tl.permute(x, (1, 4, 3, 5, 6, 0, 2))
            y = tl.dot(keys, tl.reshape(right, [D, ROWS]), input_precision="ieee")
        elif form.group == 32:
            params = key_params + number * (4 * D)
            first = tl.dot(keys, scaled_query(x, params, D), input_precision="ieee")
            y = tl.dot(keys, scaled_query(x, params + later * (2 * D), D), input_precision="ieee")
            y = tl.where((tl.arange(0, 64) % 8 < 4)[:, None], first, y)
        else:
            params = key_params + number // (form.group // 64) * (2 * D)
            y = tl.dot(keys, scaled_query(x, params, D), input_precision="ieee")
        y = tl.permute(tl.reshape(y, [8, 8, ROWS]), (2, 1, 0))  # row, g, j
        if SHARED:  # what a group's tokens share: [ROWS, g]
            at = shares + (tile * 2 if form.group == 32 else tile // (form.group // 64)) * ROWS + row
            shared = tl.load(at)[:, None]
            if form.group == 32:
                shared = tl.where((tl.arange(0, 8) < 4)[None, :], shared, tl.load(at + later * ROWS)[:, None])
        if form.in_trellis:
            scales = token_scales(key_params + number * 64, ROWS) * worth[:, None, None]
            y = (y + offset[:, None, None]) * scales
        elif IN_LOG2:
            y = y * worth[:, None, None]
        if IN_LOG2:
            if SHARED:
                y += shared[:, :, None]
            if form.center_rows == PER_TOKEN:
                y += from_threads(tl.load(token_shares + tile * 64), ROWS, 4) * LOG2E
            y = capped(y, softcap * LOG2E, form.is_capped)
        if form.mask == 3:
            token = tl.arange(0, 256)[None, :]  # j, g, q
            at = tile * 64 + (token // 4 % 8 * 8 + token // 32)
            seen = tl.load(mask + at * m_token, at < low_bit, 0) if form.group == 32 else tl.load(mask + at * m_token)
            seen = tl.permute(tl.reshape(seen != 0, [8, 8, 4]), (1, 2, 0))
            y = tl.where(in_rows(seen, ROWS=ROWS), y, float("-inf"))
        elif form.mask > 0:
            bias = tl.load(mask + (mask_at + tile * 64 * m_token), mask_token + tile * 64 < low_bit, 0)
            if form.mask == 1:
                y = tl.where(from_threads(bias != 0, ROWS, 1), y, float("-inf"))
            else:
                y += from_threads(bias.to(tl.float32), ROWS, 1) * LOG2E
        if form.sink_tokens > 0:  # noqa: SIM102 - a constant, then a value
            if tile <= last:  # most records have no sinks
                for place in range(form.sink_tokens):
                    y = tl.where((within == tl.load(sink_index + place))[None, :, :], float("-inf"), y)
        if form.group == 32:
            y = tl.where((within < low_bit)[None, :, :], y, float("-inf"))
        top = tl.max(tl.reshape(tl.max(y, 2), [ROWS, 4, 2]), 2)
        if not IN_LOG2:
            top = top * worth[:, None]
            y = y * worth[:, None, None]
        if form.sink_tokens > 0 or form.mask > 0 or form.group == 32:
            top = tl.maximum(top, NOTHING_SEEN)
        above = y - in_pairs(top, ROWS)[:, :, None]
        if SHARED and not IN_LOG2:
            top += tl.max(tl.reshape(shared, [ROWS, 4, 2]), 2) if form.group == 32 else shared
        bases = in_pairs(top, ROWS)
        offsets = tl.permute(tl.reshape(above.to(logits.dtype.element_ty), [NT, 4, 2, 8, 8]), (2, 0, 3, 1, 4))
        tl.store(logits + logits_at, tl.reshape(offsets, [2, NT * 256]), kept)
        tops = tl.reshape(tl.permute(tl.reshape(top, [NT, 4, 2, 4]), (2, 0, 3, 1)), [NT * 32])
        tl.store(base + base_at, tops, base_kept)
        higher = tl.maximum(peak, bases)
        total = total * tl.exp2(peak - higher) + tl.sum(tl.exp2(above), 2) * tl.exp2(bases - higher)
        peak = higher
        logits += 128 * Q
        base += 8 * Q
    most = tl.max(peak, 1)
    total = tl.sum(total * tl.exp2(peak - most[:, None]), 1)
    at = (bh * splits + split) * ROWS + row
    tl.store(peaks + at, tl.where(total > 0, most, float("-inf")))
    tl.store(totals + at, total)


def attend_keys(new: AttentionInputs, read: TierInputs, kept: tuple[Tensor, Tensor]) -> Sums:
    """Write the low-bit tier's kept logits of all rows, without sinks; returns their sums, which have no values."""
    q, cursor, (tiers, layout, scale, softcap) = new.q, new.cursor, read
    codes, key_params, keys_center = tiers.codes, tiers.key_params, tiers.center
    batch, query_heads, lanes, d = q.shape
    _, heads, capacity = shape_of_scores(codes, cursor)
    group, dim, centered = group_of(tiers), stored_dim(d), keys_center.shape[2]
    in_trellis, padded = is_trellis(key_params), rows_of(q, heads)
    splits = splits_of(batch * heads, triton.cdiv(capacity, RECORD), q.device, PROGRAMS)
    kind = torch.float32 if q.dtype == torch.float32 else torch.float16
    query = q.new_empty((batch * heads, padded * dim), dtype=kind)
    unit = q.new_empty((batch * heads, 2, padded), dtype=torch.float32)
    shares = q.new_empty((batch * heads, capacity // group, padded), dtype=torch.float32)
    center_shares = unit
    if centered:
        center_shares = share_of_center(q, keys_center, cursor, capacity, group, scale)
    kind_of_mask, mask, strides = mask_form(new.mask, q)
    form = Form(
        dim, layout.key_bits, group, codes.shape[3], lanes, query_heads // heads * lanes, padded,
        tiers.sink_index.shape[2], centered, kind_of_mask, softcap is not None, in_trellis,
        nested(dim, layout.key_bits, in_trellis, 8),  # a channel has its own scale
    )  # fmt: skip
    common = dict(
        heads=heads, capacity=capacity, columns=cursor.stride(0), share_blocks=center_shares.shape[-1] // 16, form=form
    )
    chunks = triton.cdiv(capacity // group, GROUPS) if centered == STEPPED or not in_trellis else 1
    prepare_query[batch * heads, chunks](
        q, key_params, center_shares, cursor, query, unit, shares, q.stride()[:3], scale=scale, d=d,
        TURNED=rotation_block(d) if layout.is_rotated else 1, GROUPS=GROUPS, **common, num_warps=max(4, padded // 2),
    )  # fmt: skip
    sums = empty_sums(batch * heads, splits, padded, 0, q.device)
    score_keys[batch * heads, splits](
        query, unit, shares, center_shares, codes, key_params, mask, cursor, tiers.sink_index,
        *kept, sums.peaks, sums.totals, **strides, softcap=softcap or 1.0, splits=splits, **common,
        num_warps=1, num_stages=1,
    )  # fmt: skip
    return sums
