"""Triton: attention of a decode step over the 16-bit pairs: slots, ring, new pairs and sink tokens."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl
from torch import Tensor

from specache_compile.kernels.attention.kept_logits import LOWEST
from specache_compile.kernels.attention.triton_logits import LOG2E, finite, place_of_base, place_of_logit, visible
from specache_compile.kernels.state.operands import AttentionInputs, TierInputs
from specache_compile.kernels.state.page_table import shape_of_scores
from specache_compile.kernels.state.triton_cursor import AT_LENGTH, AT_LOW_BIT, AT_NEXT_LOW_BIT

from .triton_decode import (
    EXACT_BLOCK,
    FEWEST_CHANNELS,
    MASK_STRIDES,
    Sums,
    empty_sums,
    exact_splits,
    mask_form,
    rows_of,
)

# Pairs per tile, and tokens per base.
BLOCK, NOTHING_SEEN = tl.constexpr(EXACT_BLOCK), tl.constexpr(LOWEST)
# Programs per multiprocessor that the registers allow.
PROGRAMS = 8


# What `attend_pairs` is compiled for. window, top_k, sink_tokens: W, k and s. rows: R; later ones of the `padded`
# rows repeat them. channels: d, padded. mask, is_capped: as MASK and CAP in `triton_logits`.
Form = namedtuple("Form", "d channels window top_k sink_tokens lanes rows padded has_values mask is_capped")


@triton.jit(do_not_specialize=[*MASK_STRIDES, "capacity", "columns"])
def attend_pairs(
    # q [B, Hq, lanes, d]; k and v [B, H, lanes, d], the new pairs; mask [B, Hq, lanes, > n] uint8 or additive, unused
    # without a mask; cursor int64 [B, columns].
    q, k, v, mask, cursor,
    # recent [B, H, W, 2, d], sink_pairs [B, H, s, 2, d], slots [B, H, k, 2, d], unused without values; sink_index
    # [B, 1, s] and slot_index [B, H, k] int32 (-1: none).
    recent, sink_pairs, slots, sink_index, slot_index,
    # Written: kept logits and their base (`kept_logits.py`) if not None, and a `Sums`.
    logits, base, sums,
    # Strides of q, k and v, of three dimensions each, then of the mask [B, Hq, lanes, tokens], 0 for broadcast ones.
    strides, m_batch, m_head, m_row, m_token,
    # H, C in tokens, columns of the cursor.
    scale, softcap, heads, capacity, columns,
    form: tl.constexpr,
):  # fmt: skip
    """One program: all query rows of a KV head, over a split of its 16-bit pairs. Keeps logits of slots and candidates.

    Row r is lane r % lanes of query head r // lanes. Bytes: 4·d per pair, half without values. FLOPs: 4·ROWS·d.
    """
    d: tl.constexpr = form.d
    lanes: tl.constexpr = form.lanes
    rows: tl.constexpr = form.rows
    ROWS: tl.constexpr = form.padded
    CHANNELS: tl.constexpr = form.channels
    kind: tl.constexpr = q.dtype.element_ty
    precision: tl.constexpr = "ieee" if kind == tl.float32 else "tf32"
    bh, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    batch, head = bh // heads, bh % heads
    cursor += batch * columns
    length, low_bit = tl.load(cursor + AT_LENGTH), tl.load(cursor + AT_LOW_BIT)
    candidates = tl.minimum(tl.load(cursor + AT_NEXT_LOW_BIT), length)
    row, channel, within = tl.arange(0, ROWS), tl.arange(0, CHANNELS), tl.arange(0, BLOCK)
    lane, query_head = row % rows % lanes, head * (rows // lanes) + row % rows // lanes
    q_row = q + batch * strides[0] + query_head * strides[1] + lane * strides[2]
    k_row, v_row = k + batch * strides[3] + head * strides[4], v + batch * strides[6] + head * strides[7]
    mask += batch * m_batch
    mask_row = query_head * m_head + lane * m_row
    sink_row = sink_index + batch * form.sink_tokens
    PAIRS: tl.constexpr = (rows + 1) // 2
    if logits is not None:
        logits += bh * capacity * (2 * PAIRS)
        base += bh * (capacity // BLOCK) * (2 * PAIRS)
    inside, kept = channel < d, row < 2 * PAIRS
    query = tl.load(q_row[:, None] + channel[None, :], inside[None, :], 0.0)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, CHANNELS], tl.float32)
    slot_blocks: tl.constexpr = (form.top_k + BLOCK - 1) // BLOCK
    recent_blocks = tl.cdiv((length - low_bit).to(tl.int32), BLOCK)
    before_sinks = slot_blocks + recent_blocks + 1
    blocks = before_sinks + (form.sink_tokens + BLOCK - 1) // BLOCK
    share = tl.cdiv(blocks, splits)
    for block in range(split * share, tl.minimum(blocks, (split + 1) * share)):
        # Order: slots, recent ring, new pairs of the lanes, sinks. Compute each pair's pointer and token index.
        place = block * BLOCK + within
        if block < slot_blocks:
            tokens = tl.load(slot_index + bh * form.top_k + place, place < form.top_k, -1).to(tl.int64)
            there = (tokens >= 0) & (tokens < low_bit)
            keys_at = slots + (bh * form.top_k + place) * (2 * d)
            values_at = keys_at + d
            scored = there
        elif block < slot_blocks + recent_blocks:
            tokens = low_bit + (place - slot_blocks * BLOCK)
            there = tokens < length
            keys_at = recent + (bh * form.window + tokens % form.window) * (2 * d)
            values_at = keys_at + d
            scored = tokens < candidates
        elif block >= before_sinks:
            sink = place - before_sinks * BLOCK
            tokens = tl.load(sink_row + sink, sink < form.sink_tokens, -1).to(tl.int64)
            there = (tokens >= 0) & (tokens < low_bit)
            keys_at = sink_pairs + (bh * form.sink_tokens + sink) * (2 * d)
            values_at = keys_at + d
            scored = within < 0
        else:
            there = within < lanes
            tokens = length + tl.zeros_like(within)
            keys_at = k_row + within.to(tl.int64) * strides[5]
            values_at = v_row + within.to(tl.int64) * strides[8]
            scored = within < 0
        loaded = there[:, None] & inside[None, :]
        keys = tl.load(keys_at[:, None] + channel[None, :], loaded, 0.0)
        if form.has_values:
            values = tl.load(values_at[:, None] + channel[None, :], loaded, 0.0)
        x = tl.dot(query, tl.trans(keys), input_precision=precision) * scale
        # Only the new pairs are causal. Triton 3.9's interpreter broadcasts no scalar here, so compare positions.
        others = (place < (before_sinks - 1) * BLOCK) | (place >= before_sinks * BLOCK)
        causal = others[None, :] | (within[None, :] <= lane[:, None])
        x = visible(x, softcap, mask, mask_row, tokens * m_token, there, causal, form.mask, form.is_capped) * LOG2E
        highest = tl.max(x, 1)
        if logits is not None:
            base_at = base + place_of_base(tokens[None, :] // BLOCK, row[:, None], PAIRS)
            stored = kept[:, None] & scored[None, :]
            bases = tl.maximum(highest, NOTHING_SEEN)[:, None] + tl.zeros_like(x)
            if block < slot_blocks:
                bases = tl.load(base_at, stored, 0.0)
            else:  # a tile of the ring has the tokens of one base
                tl.store(base_at, bases, stored & (within == 0)[None, :])
            tl.store(logits + place_of_logit(tokens[None, :], row[:, None], PAIRS), x - bases, stored)
        higher = tl.maximum(peak, highest)
        weights, shrink = tl.exp2(x - finite(higher)[:, None]), tl.exp2(peak - finite(higher))
        peak, total = higher, total * shrink + tl.sum(weights, 1)
        if form.has_values:
            summed = tl.dot(weights.to(kind), values, summed * shrink[:, None], input_precision=precision)
    at = (bh * splits + split) * ROWS + row
    if form.has_values:
        tl.store(sums.partial + at[:, None] * d + channel[None, :], summed, (row >= 0)[:, None] & inside[None, :])
    tl.store(sums.peaks + at, peak)
    tl.store(sums.totals + at, total)


def attend_exact(
    new: AttentionInputs, read: TierInputs, fetched: tuple[Tensor, Tensor] | None, kept: tuple[Tensor, Tensor] | None
) -> Sums:
    """Return the sums over the 16-bit pairs.

    fetched: the slots and slot_index; None to read neither slots nor values.
    kept: kept logits and their base, to which the logits of slots and of candidates in the ring are written. Slots keep
        their base from the low-bit tier.
    """
    q, k, v, cursor, tiers = *new[:3], new.cursor, read.tiers
    kind, mask, mask_strides = mask_form(new.mask, q)
    batch, query_heads, lanes, d = q.shape
    _, heads, capacity = shape_of_scores(tiers.codes, cursor)
    rows, window, sink_tokens = rows_of(q, heads), tiers.recent.shape[2], tiers.sink_index.shape[2]
    slots, slot_index = fetched or (tiers.recent[:, :, :0], tiers.sink_index)
    top_k, values = slots.shape[2], fetched is not None
    blocks = sum(triton.cdiv(size, EXACT_BLOCK) for size in (top_k, window, sink_tokens)) + 1
    splits = exact_splits(batch * heads, blocks, q.device, PROGRAMS)
    sums = empty_sums(batch * heads, splits, rows, d if values else 0, q.device)
    form = Form(
        d=d, channels=max(FEWEST_CHANNELS, triton.next_power_of_2(d)), window=window, top_k=top_k,
        sink_tokens=sink_tokens, lanes=lanes, rows=query_heads // heads * lanes, padded=rows, has_values=values,
        mask=kind, is_capped=read.softcap is not None,
    )  # fmt: skip
    attend_pairs[batch * heads, splits](
        q, k, v, mask, cursor, tiers.recent, tiers.sink_pairs, slots, tiers.sink_index,
        slot_index, *(kept or (None, None)), sums, (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        **mask_strides, scale=read.scale, softcap=read.softcap or 1.0, heads=heads, capacity=capacity,
        columns=cursor.stride(0), form=form, num_warps=1,
    )  # fmt: skip
    return sums
