"""Triton: decode attention over the device's tiers for all lanes, split over the cache, with the selection scores.

The CUDA implementation of `attention.decode_attention`, in three launches:

    attend_tiers   (B·H, E + S)        E shares of what is in 16 bits, then S of the low-bit tier
    merge_splits   (B·Hq·lanes)        log-sum-exp over the shares and the sink
    score_tokens   (B·H, C / 1024)     Σ over the query group of exp(logit - lse) of the last lane

before which `rotate_rows` turns q where the low-bit tier is rotated. The halves of a corrected step: `triton_scored`.
The low-bit tier's loop is in `triton_low_bit`; one group of tokens is one tile there. In shapes: B rows, H KV heads,
Hq query heads, G = Hq / H, n cached tokens, C tokens' capacity, W tokens' window, k slots, s sink tokens, d channels,
groups of g tokens or gv channels, w bytes of a token's keys and values. Strides are in elements, the channels side by
side.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specache_compile.kernels.codes.trellis import circle_of, is_trellis
from specache_compile.kernels.movement.copy_stream import wait_for_correction
from specache_compile.kernels.state.center import ROWS as CENTER_ROWS
from specache_compile.kernels.state.layout import Layout, rotation_block
from specache_compile.kernels.state.page_table import has_table, shape_of_scores
from specache_compile.kernels.state.stored_tiers import StoredTiers
from specache_compile.kernels.state.triton_center import share_of_center
from specache_compile.kernels.state.triton_cursor import AT_LENGTH, AT_LOW_BIT, AT_NEXT_LOW_BIT
from specache_compile.kernels.state.triton_rotate import hadamard, rotated
from specache_compile.kernels.state.triton_sinks import sinks_among

from .attention_ops import SEEN
from .kept_logits import LOGIT_BLOCK
from .triton_low_bit import attend_low_bit
from .triton_softmax import biased, capped, finite, grown, shown

# An additive mask below this hides its token.
HIDDEN = tl.constexpr(SEEN)
# Which shares a launch has: a program of one kind alone needs fewer registers.
ALL_SHARES, EXACT_SHARES, LOW_BIT_SHARES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# What a mask is, as a kernel sees it; padding is a bool one of one row for all heads and lanes.
NO_MASK, BOOL_MASK, ADDITIVE_MASK, PADDING = range(4)
# A mask's strides that grow with the cache, as the counts of shares do: a kernel made anew for each that is, or is not,
# a multiple of 16, or is 1, would be compiled in the middle of a generation.
MASK_STRIDES = ("m_batch", "m_head", "m_row")
# The smallest sides of a product that fill a tensor core instruction: query rows, and channels.
FEWEST_ROWS, FEWEST_CHANNELS = 8, 16
# Pairs in 16 bits per tile: of the slots, the ring and the new ones (more would spill registers; a tile's logits have
# one base), and of a low-bit tier that is not quantised.
EXACT_BLOCK, PLAIN_BLOCK = LOGIT_BLOCK, 32
SCORE_BLOCK = 1024
# Warps of a program of `attend_tiers`, see `triton_low_bit`. At d 256 two warps would spill nothing, where one does in
# the exact tiers' loop, but spend a fifth more instructions on the low-bit tier.
WARPS = 1
# Parts that `merge_splits` holds in registers, padded: few sizes, for each is a kernel that a growing cache comes to.
PART_SIZES = (8, 32, 128)
# Parts, at most; programs that follow one another in one place, at most; the fewest tiles in 16 bits that are worth a
# program of their own.
MOST_PARTS, MOST_ROUNDS, FEWEST_TILES = PART_SIZES[-1], 4, 3
# In tiles of the low-bit tier, by their instructions (tools/compile_kernels.py): a tile in 16 bits, and a program's
# beginning and end.
EXACT_TILE, PROLOGUE = 0.75, 1.5


@dataclass(frozen=True)
class Build:
    """How `attend_tiers` is compiled, and so how many of its programs run at once.

    programs: on a multiprocessor, by their registers.
    shared: bytes of shared memory of one, and of what the driver keeps for it.
    stages: tiles of which the compiler has loads under way; 1: as many as there are programs.
    registers: of a thread, at most; None: as many as there are.
    """

    programs: int
    shared: int
    stages: int = 3
    registers: int | None = None

    @property
    def options(self) -> dict[str, int | None]:
        """The compiler's, by Triton's names for them."""
        return {"num_stages": self.stages, "maxnreg": self.registers}


# An instruction waits for the one before, and a scheduler has two warps of eight programs. Measured on an H200, of the
# halves of a corrected step: sixteen are worth more, to values in a trellis more than loads that begin a tile ahead.
# What keys spill for it lies outside their loop. Other sizes than these take all registers.
WHOLE, PLAIN_VALUES = Build(8, 20 << 10), Build(8, 20 << 10, stages=1)
KEYS_ALONE, TRELLIS_ALONE = Build(16, 8 << 10, registers=128), Build(16, 3 << 10, stages=1)
MOST_CHANNELS, MOST_KEY_BITS = 128, 2


@triton.jit
def attend_exact(
    # Of attend_tiers' rows [ROWS]: where q, the mask's row, the logits, their base and the sums of each lie; which are
    # rows at all, which of them keep their logits, and each one's lane.
    q_row, mask_row, logits_row, base_row, out_row, real, kept, lane,
    # The KV head's number in [B, H]; tokens cached, in the low-bit tier, and to be selected from; and the share: number
    # `split` of `splits`.
    bh, length, low_bit, candidates, split, splits,
    # As attend_tiers has them, but k and v at this head's first new token.
    recent, slots, slot_index, sink_pairs, sink_row, k_row, v_row, k_lane, v_lane, mask, m_token, scale, softcap,
    d: tl.constexpr, window: tl.constexpr, top_k: tl.constexpr, sink_tokens: tl.constexpr, lanes: tl.constexpr,
    stored: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, MASK: tl.constexpr, CAP: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A share of slots, the recent ring, the lanes' new pairs and the sink tokens, in 16 bits: stores its sums, returns
    peak and total.

    Bytes and FLOPs: those of attend_tiers.
    """
    kind: tl.constexpr = q_row.dtype.element_ty
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    channel = tl.arange(0, CHANNELS)
    inside = channel < d
    query = tl.load(q_row[:, None] + channel[None, :], real[:, None] & inside[None, :], 0.0)
    within = tl.arange(0, EXACT)
    sums = tl.zeros([ROWS, CHANNELS], tl.float32)
    slot_blocks: tl.constexpr = (top_k + EXACT - 1) // EXACT
    recent_blocks = tl.cdiv((length - low_bit).to(tl.int32), EXACT)
    before_sinks = slot_blocks + recent_blocks + 1
    blocks = before_sinks + (sink_tokens + EXACT - 1) // EXACT
    share = tl.cdiv(blocks, splits)
    for block in range(split * share, tl.minimum(blocks, (split + 1) * share)):
        # Slots, the recent ring, the new pairs of the lanes, then sinks: where a pair lies, and its token's number.
        place = block * EXACT + within
        if block < slot_blocks:
            index = tl.load(slot_index + bh * top_k + place, place < top_k, -1).to(tl.int64)
            there = (index >= 0) & (index < low_bit)
            tokens = index
            keys_at = slots + (bh * top_k + place) * (2 * d)
            values_at = keys_at + d
            scored = there
        elif block < slot_blocks + recent_blocks:
            tokens = low_bit + (place - slot_blocks * EXACT)
            there = tokens < length
            keys_at = recent + (bh * window + tokens % window) * (2 * d)
            values_at = keys_at + d
            scored = tokens < candidates
        elif block >= before_sinks:
            sink = place - before_sinks * EXACT
            tokens = tl.load(sink_row + sink, sink < sink_tokens, -1).to(tl.int64)
            there = (tokens >= 0) & (tokens < low_bit)
            keys_at = sink_pairs + (bh * sink_tokens + sink) * (2 * d)
            values_at = keys_at + d
            scored = within < 0
        else:
            there = within < lanes
            tokens = length + tl.zeros_like(within)
            keys_at = k_row + within.to(tl.int64) * k_lane
            values_at = v_row + within.to(tl.int64) * v_lane
            scored = within < 0
        loaded = there[:, None] & inside[None, :]
        keys = tl.load(keys_at[:, None] + channel[None, :], loaded, 0.0)
        if VALUES:
            values = tl.load(values_at[:, None] + channel[None, :], loaded, 0.0)
        logits = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        logits = capped(logits * scale, softcap, CAP)
        # Only the new pairs are causal. By places: Triton 3.9's interpreter takes no number for a whole row.
        others = (place < (before_sinks - 1) * EXACT) | (place >= before_sinks * EXACT)
        causal = others[None, :] | (within[None, :] <= lane[:, None])
        seen = real[:, None] & shown(there, mask, tokens * m_token, MASK)[None, :] & causal
        logits = biased(logits, mask, mask_row[:, None] + (tokens * m_token)[None, :], seen, MASK)
        highest = tl.max(logits, 1)
        if KEYS and stored > 0:
            base = tl.zeros([ROWS], tl.float32)
            if not VALUES:  # nothing but the ring is scored: there are no slots
                base, number = finite(highest), low_bit // EXACT + block
                if (block < recent_blocks) & (number * EXACT < candidates):
                    tl.store(base_row + number, base, kept)
            tl.store(logits_row[:, None] + tokens[None, :], logits - base[:, None], kept[:, None] & scored[None, :])
        weights, shrink, peak, total = grown(logits, highest, peak, total)
        if VALUES:
            sums = tl.dot(weights.to(kind), values, sums * shrink[:, None], input_precision=PRECISION)
    if VALUES:
        tl.store(out_row[:, None] + channel[None, :], sums, real[:, None] & inside[None, :])
    return peak, total


@triton.jit(do_not_specialize=[*MASK_STRIDES, "columns", "exact", "splits", "first"])
def attend_tiers(
    # q [B, Hq, lanes, d]; turned, q rotated and contiguous, anything where it is not; k and v [B, H, lanes, d], the new
    # pairs; mask [B, Hq, lanes, > n] uint8 or additive, anything without a mask; cursor int64 [B, 4].
    q, turned, k, v, mask, cursor,
    # The low-bit tier: codes [B, H, C, w] uint8, seen as [..., w/2] int16 where spans are even, or [..., 2·d] of q's
    # dtype; key_params [B, H, C/g, 2, d] and value_params [B, H, C, 2, d/gv]: scale, then zero, in this dtype or in 8
    # bits (in the trellis code a scale, [B, H, C/g, 1, g] and [B, H, C, 1, 1]). Tiers are contiguous.
    codes, key_params, value_params,
    # recent [B, H, W, 2, d], sink_pairs [B, H, s, 2, d] and sink_index [B, 1, s] int32 (-1: none), slots
    # [B, H, k, 2, d], slot_index [B, H, k] int32 (-1: empty).
    recent, sink_pairs, sink_index, slots, slot_index,
    # shares [B, Hq, lanes, share_columns] float32, of the center, for tokens, or groups where it is stepped; anything
    # where keys are not centered.
    shares,
    # Written where KEYS, the low-bit tier's read where not: logits [B, Hq, stored, C], 16-bit or float32; and of a half
    # their base [B, Hq, stored, C/16] float32, else anything.
    logits, base,
    # Written: out [B·H, E + S, ROWS, d], where VALUES, peaks and totals [B·H, E + S, ROWS] float32.
    out, peaks, totals,
    # q_batch, q_head, q_lane: strides of q [B, Hq, lanes, d]; of k and v [B, H, lanes, d]; and of the mask
    # [B, Hq, lanes, tokens], 0 along what it is broadcast over.
    q_batch, q_head, q_lane, k_batch, k_head, k_lane, v_batch, v_head, v_lane, m_batch, m_head, m_row, m_token,
    scale, softcap,
    # H, C in tokens, columns of the cursor and of the center's shares; E, shares of the exact tiers, and S, of the
    # low-bit tier; of all the first one of this launch.
    heads, capacity, columns, share_columns, exact, splits, first,
    d: tl.constexpr, key_bits: tl.constexpr, value_bits: tl.constexpr, group: tl.constexpr, value_group: tl.constexpr,
    window: tl.constexpr, top_k: tl.constexpr, sink_tokens: tl.constexpr, lanes: tl.constexpr, queries: tl.constexpr,
    stored: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ROTATED: tl.constexpr, CENTERED: tl.constexpr,
    MASK: tl.constexpr, CAP: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, SPAN: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, KEY_CIRCLE: tl.constexpr, CIRCLE: tl.constexpr,
    PAGED: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """One program: all lanes and query heads of one KV head, over a share of its tiers.

    queries: G. stored: of the lanes the last ones, which keep their logits. KEYS: the low-bit tier's logits are made
    here; if not, they are there. VALUES: there are sums. ROTATED: the low-bit tier is. CENTERED: rows of its center.
    MASK: NO_MASK, BOOL_MASK, ADDITIVE_MASK, PADDING. CAP: whether there is a softcap. ROWS, CHANNELS: G·lanes and d,
    padded; row r is lane r % lanes of query head r // lanes. SPAN, KEY_CIRCLE, CIRCLE: see triton_low_bit. EXACT:
    16-bit pairs a tile, and tokens that have one base. SHARES: which kinds of shares the launch has.

    Bytes read a KV head: n·(w + 4·d/g + 4·d/gv) of the low-bit tier, 4·d·(W + k + s + lanes) in 16 bits; written:
    2·G·n of logits, 4·(d + 2)·ROWS a split. FLOPs: 4·G·lanes·d a token, and less than half of it for zero points. A
    half has its part of the codes and scales alone, and `kept_logits.bytes_of_logit`·G·lanes·n of logits.
    """
    bh, split = tl.program_id(0).to(tl.int64), first + tl.program_id(1)
    batch, head = bh // heads, bh % heads
    cursor += batch * columns
    length, low_bit = tl.load(cursor + AT_LENGTH), tl.load(cursor + AT_LOW_BIT)
    row = tl.arange(0, ROWS)
    real = row < queries * lanes
    lane = row % lanes
    query_head = head * queries + row // lanes
    q_row = q + batch * q_batch + query_head * q_head + lane * q_lane
    mask, mask_row = mask + batch * m_batch, query_head * m_head + lane * m_row
    keeps = lane - (lanes - stored)
    keeping = (batch * heads * queries + query_head) * stored + keeps
    logits_row, base_row = logits + keeping * capacity, base + keeping * (capacity // EXACT)
    kept = real & (keeps >= 0)
    at = (bh * (exact + splits) + split) * ROWS + row

    out_row, sink_row = out + at * d, sink_index + batch * sink_tokens
    # At short contexts the exact shares take longest, so they start first.
    if SHARES == LOW_BIT_SHARES or (SHARES == ALL_SHARES and split >= exact):
        if ROTATED:
            q_row = turned + ((batch * heads * queries + query_head) * lanes + lane) * d
        shares_row = (batch * heads * queries + query_head) * lanes + lane
        shares_row = shares + shares_row * share_columns
        peak, total = attend_low_bit(
            q_row, mask_row, logits_row, base_row, shares_row, out_row, real, kept,
            bh=bh, heads=heads, table=cursor, low_bit=low_bit, split=split - exact, splits=splits,
            codes=codes, key_params=key_params, value_params=value_params, slot_index=slot_index, sink_row=sink_row,
            mask=mask, m_token=m_token, scale=scale, softcap=softcap, capacity=capacity,
            d=d, key_bits=key_bits, value_bits=value_bits, group=group, value_group=value_group, top_k=top_k,
            sink_tokens=sink_tokens, stored=stored, KEYS=KEYS, VALUES=VALUES, MASK=MASK, CAP=CAP, CENTERED=CENTERED,
            ROWS=ROWS, CHANNELS=CHANNELS, SPAN=SPAN, EXACT=EXACT, PRECISION=PRECISION, KEY_CIRCLE=KEY_CIRCLE,
            CIRCLE=CIRCLE, PAGED=PAGED,
        )  # fmt: skip
    else:
        k_row, v_row = k + batch * k_batch + head * k_head, v + batch * v_batch + head * v_head
        candidates = tl.minimum(tl.load(cursor + AT_NEXT_LOW_BIT), length)
        peak, total = attend_exact(
            q_row, mask_row, logits_row, base_row, out_row, real, kept, lane,
            bh=bh, length=length, low_bit=low_bit, candidates=candidates, split=split, splits=exact,
            recent=recent, slots=slots, slot_index=slot_index, sink_pairs=sink_pairs, sink_row=sink_row,
            k_row=k_row, v_row=v_row, k_lane=k_lane, v_lane=v_lane,
            mask=mask, m_token=m_token, scale=scale, softcap=softcap, d=d, window=window, top_k=top_k,
            sink_tokens=sink_tokens, lanes=lanes, stored=stored, KEYS=KEYS, VALUES=VALUES, MASK=MASK, CAP=CAP,
            ROWS=ROWS, CHANNELS=CHANNELS, EXACT=EXACT, PRECISION=PRECISION,
        )  # fmt: skip
    tl.store(peaks + at, peak)
    tl.store(totals + at, total)


@triton.jit(do_not_specialize=["parts", "exact"])
def merge_splits(
    # attend_tiers' sums: partial [B·H, parts, ROWS, d], where VALUES, peaks and totals [B·H, parts, ROWS], float32;
    # sinks [Hq].
    partial, peaks, totals, sinks,
    # Written: out [B, Hq, lanes, d] in q's dtype, where VALUES, lse [B, Hq, stored] float32 of the last lanes.
    out, lse,
    # E + S, E, Hq.
    parts, exact, query_heads,
    d: tl.constexpr, lanes: tl.constexpr, queries: tl.constexpr, stored: tl.constexpr, VALUES: tl.constexpr,
    SINKS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """One program: one query head and lane. Writes its output and its log-sum-exp.

    PARTS, CHANNELS: parts and d, padded. TURNED: channels that the low-bit tier, all parts but the first E, has
    rotated together; 1: none. Bytes: 4·(d + 2)·parts read, 2·d + 4 written. FLOPs: 2·d·parts, and d·log2(TURNED).
    """
    number = tl.program_id(0).to(tl.int64)
    bh, row = number // (queries * lanes), number % (queries * lanes)
    part, channel = tl.arange(0, PARTS), tl.arange(0, CHANNELS)
    at = (bh * parts + part) * ROWS + row
    peak = tl.load(peaks + at, part < parts, float("-inf"))
    highest = tl.max(peak, 0)
    head = (bh * queries + row // lanes) % query_heads
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        highest = tl.maximum(highest, sink)
    base = finite(highest)
    shrink = tl.exp(peak - base)
    total = tl.sum(tl.load(totals + at, part < parts, 0.0) * shrink, 0)
    if SINKS:
        total += tl.exp(sink - base)
    if VALUES:
        there = (part < parts)[:, None] & (channel < d)[None, :]
        sums = tl.load(partial + at[:, None] * d + channel[None, :], there, 0.0) * shrink[:, None]
        if TURNED > 1:
            low_bit = tl.sum(tl.where((part >= exact)[:, None], sums, 0.0), 0)
            summed = tl.reshape(hadamard(tl.reshape(low_bit, [CHANNELS // TURNED, TURNED])), [CHANNELS])
            summed += tl.sum(tl.where((part < exact)[:, None], sums, 0.0), 0)
        else:
            summed = tl.sum(sums, 0)
        result = tl.where(total > 0, summed / total, 0.0)
        tl.store(out + number * d + channel, result.to(out.dtype.element_ty), channel < d)
    keeps = row % lanes - (lanes - stored)
    if keeps >= 0:
        tl.store(lse + number // lanes * stored + keeps, tl.where(total > 0, base + tl.log(total), float("inf")))


@triton.jit(do_not_specialize=[*MASK_STRIDES, "columns"])
def score_tokens(
    # logits [B, Hq, stored, C] and base [B, Hq, stored, C/16] as attend_tiers left them, lse [B, Hq, stored] float32;
    # mask [B, Hq, lanes, > n]; cursor int64 [B, 4]; sink_index [B, 1, s] int32.
    logits, base, lse, mask, cursor, sink_index,
    # Written: scores [stored, B, H, C] float32; -1: no candidate.
    scores,
    # m_batch, m_head, m_row, m_token: strides of the mask [B, Hq, lanes, tokens], 0 along what it is broadcast over.
    m_batch, m_head, m_row, m_token,
    # H, C in tokens, columns of the cursor.
    heads, capacity, columns,
    lanes: tl.constexpr, queries: tl.constexpr, stored: tl.constexpr, sink_tokens: tl.constexpr, MASK: tl.constexpr,
    BASE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a block of tokens of one KV head, for one of the last `stored` lanes. BASE: whether there is one, of
    so many TOKENS each.

    Bytes a token: 2·G, or 4·G in float32, the bases' and the mask's read, 4 written. FLOPs: 3·G, one of them an
    exponential.
    """
    bh, keeps = tl.program_id(0).to(tl.int64), tl.program_id(2)
    cursor += (bh // heads) * columns
    based = tl.program_id(1).to(tl.int64) * (BLOCK // TOKENS) + tl.arange(0, BLOCK // TOKENS)[:, None]
    tokens = based * TOKENS + tl.arange(0, TOKENS)[None, :]
    candidates = tl.minimum(tl.load(cursor + AT_NEXT_LOW_BIT), tl.load(cursor + AT_LENGTH))
    there = tokens < candidates
    # Logits are read by whole bases: a mask of single tokens would make a load of each.
    begun = tl.cdiv(candidates, TOKENS)
    score = tl.zeros([BLOCK // TOKENS, TOKENS], tl.float32)
    for query in tl.static_range(queries):
        number = (bh * queries + query) * stored + keeps
        logit = tl.load(logits + number * capacity + tokens, based < begun, float("-inf")).to(tl.float32)
        if BASE:
            logit += tl.load(base + number * (capacity // TOKENS) + based, based < begun, 0.0)
        score += tl.exp(logit - tl.load(lse + number))
    mask += (bh // heads) * m_batch
    seen = shown(there, mask, tokens * m_token, MASK)
    if MASK == 1 or MASK == 2:
        seen = tokens < 0
        for query in tl.static_range(queries):
            at = ((bh % heads) * queries + query) * m_head + (lanes - stored + keeps) * m_row + tokens * m_token
            if MASK == 1:
                seen |= tl.load(mask + at, there, 0) != 0
            else:
                seen |= tl.load(mask + at, there, float("-inf")) > HIDDEN
    at = (keeps * tl.num_programs(0) + bh) * capacity
    seen &= ~sinks_among(tokens, sink_index + bh // heads * sink_tokens, sink_tokens=sink_tokens)
    tl.store(scores + at + tokens, tl.where(there & seen, score, -1.0), tokens < capacity)


@dataclass(frozen=True)
class Sums:
    """What attend_tiers leaves to merge_splits, which has the shapes.

    exact: so many of the parts, the first ones, are of the exact tiers.
    partial, peaks, totals: of each part.
    """

    exact: int
    partial: Tensor
    peaks: Tensor
    totals: Tensor


# Logits, and a half's base: see `kept_logits.py`.
Kept = tuple[Tensor, Tensor | None]
# A mask's kind, what a kernel loads, its strides: see `mask_form`.
MaskForm = tuple[int, Tensor | None, dict[str, int]]


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, cursor: Tensor, slots: Tensor,
    slot_index: Tensor, tiers: Sequence[Tensor], layout: Sequence[int], scale: float, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `attention.decode_attention`; all lengths are read on the device, so that the step can be captured."""
    held, how = StoredTiers(*tiers), Layout(*layout)
    batch, query_heads, lanes, _ = q.shape
    form = mask_form(mask, batch, query_heads, lanes)
    # Half precision ranks as well as the model's own dtype does, at half the bytes of float32; but not where a share of
    # the center, of thousands, is the same in all of them.
    exact = q.dtype == torch.float32 or held.center.shape[2] == CENTER_ROWS
    logits = torch.empty(
        (batch, query_heads, 1 if slots.shape[2] else 0, shape_of_scores(held.codes, cursor)[2]),
        dtype=torch.float32 if exact else torch.half, device=q.device,
    )  # fmt: skip
    sums = attend(
        q, k, v, form, cursor, slots, slot_index, held, (logits, None), how, scale, softcap,
        group=group_of(held.codes, held.key_params, how),
    )  # fmt: skip
    out, lse = merged(sums, q, k.shape[1], sinks, logits.shape[2], how)
    if not slots.shape[2]:
        return out, torch.full(shape_of_scores(held.codes, cursor), -1.0, device=q.device)
    return out, scores_of((logits, None), lse, form, cursor, held, lanes)[0]


def group_of(codes: Tensor, key_params: Tensor, layout: Layout) -> int:
    return codes.shape[2] // key_params.shape[2] if layout.is_quantised else PLAIN_BLOCK


def attend(
    q: Tensor, k: Tensor, v: Tensor, form: MaskForm, cursor: Tensor, slots: Tensor, slot_index: Tensor,
    tiers: StoredTiers, kept: Kept, layout: Layout, scale: float, softcap: float | None, group: int,
    keys: bool = True, values: bool = True, chosen: Tensor | None = None,
) -> Sums:  # fmt: skip
    """`attend_tiers`, whole or a half of it. Without `values` anything stands for slots and slot_index.

    kept: where the last lanes' logits are, and a half's base. Without `values` there are no slots. group: tokens of a
    tile; g, or without `keys` a divisor of it. chosen: the tokens that a correction brings to the slots; the low-bit
    tier is attended to without them meanwhile, in a launch of its own.
    """
    logits, base = kept
    codes, key_params, value_params, center, sink_pairs, sink_index, recent = tiers
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    batch, query_heads, lanes, d = q.shape
    _, heads, capacity = shape_of_scores(codes, cursor)
    queries = query_heads // heads
    rows = max(FEWEST_ROWS, triton.next_power_of_2(queries * lanes))
    top_k, window, sink_tokens = slots.shape[2] if values else 0, recent.shape[2], sink_index.shape[2]
    blocks = exact_blocks(top_k, window, sink_tokens)
    kind, mask, mask_strides = form
    value_group = d // value_params.shape[-1] if layout.is_quantised and values else d
    key_width, value_width = layout.widths(d)
    in_trellis = layout.is_quantised and is_trellis(value_params)
    circle = circle_of(d) // 8 if in_trellis else 0
    key_circle = circle_of(d) // 8 if layout.is_quantised and is_trellis(key_params) else 0
    span = 2 * value_width if in_trellis else math.gcd(value_width, value_group)
    build = build_of(layout, keys, values, in_trellis, d, rows, q.dtype)
    apart = None if chosen is None else programs_at_once(q.device, WHOLE)
    exact, splits = shares_of(batch * heads, capacity // group, blocks, programs_at_once(q.device, build), apart)
    if layout.is_quantised and key_width % 2 == key_circle % 2 == (circle or span) % 2 == 0:
        codes = codes.view(torch.int16)

    new = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
    partial = new((batch * heads, exact + splits, rows, d if values else 0))
    peaks, totals = (new((batch * heads, exact + splits, rows)) for _ in range(2))
    turns = layout.is_rotated and keys
    shares = q
    if centered := center.shape[2] if keys else 0:
        shares = share_of_center(q, center, cursor, capacity, group, scale)
    given = (
        q, rotated(q) if turns else q, k, v, q if mask is None else mask, cursor, codes, key_params, value_params,
        recent, sink_pairs, sink_index, slots,
    )  # fmt: skip
    written = (shares, logits, peaks if base is None else base, partial, peaks, totals)
    settings = dict(
        q_batch=q.stride(0), q_head=q.stride(1), q_lane=q.stride(2),
        k_batch=k.stride(0), k_head=k.stride(1), k_lane=k.stride(2),
        v_batch=v.stride(0), v_head=v.stride(1), v_lane=v.stride(2), **mask_strides,
        scale=scale, softcap=softcap or 1.0, heads=heads, capacity=capacity,
        columns=cursor.stride(0), share_columns=shares.shape[-1], PAGED=has_table(cursor), exact=exact, splits=splits,
        d=d, key_bits=layout.key_bits, value_bits=layout.value_bits, group=group, value_group=value_group,
        window=window, top_k=top_k, sink_tokens=sink_tokens, lanes=lanes, queries=queries,
        stored=logits.shape[2], KEYS=keys, VALUES=values, ROTATED=turns, CENTERED=centered,
        MASK=kind, CAP=softcap is not None, ROWS=rows, CHANNELS=max(FEWEST_CHANNELS, triton.next_power_of_2(d)),
        SPAN=span, EXACT=EXACT_BLOCK, KEY_CIRCLE=key_circle, CIRCLE=circle,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=WARPS,
    )  # fmt: skip
    if chosen is None:
        attend_tiers[batch * heads, exact + splits](
            *given, slot_index, *written, first=0, SHARES=ALL_SHARES, **settings, **build.options
        )
    else:
        attend_tiers[batch * heads, splits](
            *given, chosen, *written, first=exact, SHARES=LOW_BIT_SHARES, **settings, **build.options
        )
        wait_for_correction(slots)
        attend_tiers[batch * heads, exact](
            *given, slot_index, *written, first=0, SHARES=EXACT_SHARES, **settings, **WHOLE.options
        )
    return Sums(exact, partial, peaks, totals)


def build_of(
    layout: Layout, keys: bool, values: bool, in_trellis: bool, d: int, rows: int, dtype: torch.dtype
) -> Build:  # fmt: skip
    """`attend_tiers`' of these shares of the low-bit tier; those in 16 bits alone are built as WHOLE.

    rows: ROWS.
    dtype: q's.
    """
    if not layout.is_quantised:
        return WHOLE if keys else PLAIN_VALUES
    if (keys and values) or d > MOST_CHANNELS or rows > FEWEST_ROWS or dtype == torch.float32:
        return WHOLE
    if keys:
        return KEYS_ALONE if layout.key_bits <= MOST_KEY_BITS else WHOLE
    return TRELLIS_ALONE if in_trellis else WHOLE


def merged(
    sums: Sums, q: Tensor, heads: int, sinks: Tensor | None, stored: int, layout: Layout, values: bool = True
) -> tuple[Tensor, Tensor]:
    """`merge_splits`: the output [B, Hq, lanes, d] in q's dtype, without `values` an empty one, and the log-sum-exp
    [B, Hq, stored] of the last lanes."""
    batch, query_heads, lanes, d = q.shape
    _, parts, rows = sums.peaks.shape
    out = torch.empty(q.shape if values else (0,), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, query_heads, stored), dtype=torch.float32, device=q.device)
    merge_splits[(batch * query_heads * lanes,)](
        sums.partial, sums.peaks, sums.totals, q if sinks is None else sinks, out, lse,
        parts=parts, exact=sums.exact, query_heads=query_heads, d=d, lanes=lanes, queries=query_heads // heads,
        stored=stored,
        VALUES=values, SINKS=sinks is not None, ROWS=rows, PARTS=next(size for size in PART_SIZES if parts <= size),
        CHANNELS=max(FEWEST_CHANNELS, triton.next_power_of_2(d)),
        TURNED=rotation_block(d) if layout.is_rotated else 1, num_warps=4,
    )  # fmt: skip
    return out, lse


def scores_of(kept: Kept, lse: Tensor, form: MaskForm, cursor: Tensor, tiers: StoredTiers, lanes: int) -> Tensor:
    """`score_tokens`: [stored, B, H, C] of the lanes that kept their logits."""
    logits, base = kept
    batch, query_heads, stored, capacity = logits.shape
    kind, mask, mask_strides = form
    heads, sink_index = tiers.codes.shape[1], tiers.sink_index
    scores = torch.empty((stored, batch, heads, capacity), dtype=torch.float32, device=logits.device)
    score_tokens[batch * heads, triton.cdiv(capacity, SCORE_BLOCK), stored](
        logits, lse if base is None else base, lse, lse if mask is None else mask, cursor, sink_index, scores,
        **mask_strides, heads=heads, capacity=capacity, columns=cursor.stride(0), lanes=lanes,
        queries=query_heads // heads, stored=stored,
        sink_tokens=sink_index.shape[2], MASK=kind,
        BASE=base is not None, TOKENS=LOGIT_BLOCK, BLOCK=SCORE_BLOCK, num_warps=4,
    )  # fmt: skip
    return scores


def mask_form(mask: Tensor | None, batch: int, query_heads: int, rows: int) -> MaskForm:
    """The mask's kind, the tensor that the kernel loads, and the mask's strides by the kernels' names for them.

    Strides are over [B, Hq, rows, n], 0 where the mask is broadcast. rows: lanes, or new tokens.
    """
    names = ("m_batch", "m_head", "m_row", "m_token")
    if mask is None:
        return NO_MASK, None, dict.fromkeys(names, 0)
    strides = dict(zip(names, mask.expand(batch, query_heads, rows, mask.shape[-1]).stride(), strict=True))
    if mask.dtype == torch.bool:
        return PADDING if mask.shape[1] == mask.shape[2] == 1 else BOOL_MASK, mask.view(torch.uint8), strides
    return ADDITIVE_MASK, mask, strides


def exact_blocks(top_k: int, window: int, sink_tokens: int) -> int:
    """Tiles of the exact tiers, at most: slots, ring, new pairs, sinks."""
    return sum(triton.cdiv(size, EXACT_BLOCK) for size in (top_k, window, sink_tokens)) + 1


@functools.cache
def shares_of(rows: int, tiles: int, blocks: int, slots: int, apart: int | None = None) -> tuple[int, int]:
    """E and S: how many shares a head's exact tiers have, and how many its low-bit tier has.

    rows: B·H.
    tiles: of the low-bit tier.
    blocks: tiles of 16 bits in the exact tiers.
    slots: programs that the GPU runs at a time.
    apart: those of the exact shares, which have a launch, and the GPU, of their own; None: both kinds have one launch.

    E: as many shares of three tiles or more as fill a quarter of the GPU at most, those of all heads together.
    S: of the numbers that leave a share four tiles or more, and make a few rounds of programs in all, the one that ends
    first.
    """
    room = slots // 4 if apart is None else apart
    exact = max(1, min(blocks // FEWEST_TILES, room // rows, MOST_PARTS // 2))
    first = [] if apart is not None else rows * exact * [PROLOGUE + EXACT_TILE * triton.cdiv(blocks, exact)]
    most = max(1, min(tiles // 4, MOST_PARTS - exact, MOST_ROUNDS * slots // rows))

    def end(splits: int) -> float:
        return makespan(slots, first + rows * splits * [PROLOGUE + triton.cdiv(tiles, splits)])

    return exact, min(range(1, most + 1), key=end)


def makespan(slots: int, programs: list[float]) -> float:
    """When programs of these lengths have ended, of which `slots` run at a time, begun in their order."""
    ends = [0.0] * slots
    for length in programs:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


@functools.cache
def programs_at_once(device: torch.device, build: Build) -> int:
    """Programs of attend_tiers that the GPU's registers and shared memory hold.

    The interpreter runs one after another, and is told those of two multiprocessors.
    """
    if device.type != "cuda":
        return 2 * WHOLE.programs
    properties = torch.cuda.get_device_properties(device)
    fit = min(build.programs, properties.shared_memory_per_multiprocessor // build.shared)
    return fit * properties.multi_processor_count
