"""Triton: `attention_ops.decode_attention`, split over the cache, in three launches."""

# attend_tiers   (B·H, E + S)        E shares of the 16-bit pairs, then S shares of the low-bit tier
# merge_splits   (B·Hq·lanes)        log-sum-exp over the shares and the sink
# score_tokens   (B·H, C / 1024)     Σ over the query group of exp(logit - lse) of the last lane
#
# If the low-bit tier is rotated, `rotate_rows` rotates q before. `triton_scored` has the halves of a corrected step,
# `triton_low_bit` the loop over the low-bit tier, with one group of tokens per tile.
#
# Shapes: B rows, H KV heads, Hq query heads, G = Hq / H, n cached tokens, capacity of C tokens, window of W tokens,
# k slots, s sink tokens, d channels, groups of g tokens or gv channels, w bytes of a token's keys and values. Strides
# are in elements; channels are contiguous.

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

# An additive mask below this value hides its token.
HIDDEN = tl.constexpr(SEEN)
# The shares of a launch: programs of a single kind need fewer registers.
ALL_SHARES, EXACT_SHARES, LOW_BIT_SHARES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Kinds of masks in a kernel; padding is a bool mask with one row for all heads and lanes.
NO_MASK, BOOL_MASK, ADDITIVE_MASK, PADDING = range(4)
# Do not let Triton specialise on values that grow with the cache (divisible by 16, equal to 1), such as these strides
# and the numbers of shares: it would recompile during generation.
MASK_STRIDES = ("m_batch", "m_head", "m_row")
# The smallest numbers of query rows and channels that fill a tensor core instruction.
FEWEST_ROWS, FEWEST_CHANNELS = 8, 16
# 16-bit pairs per tile: of slots, ring and new pairs (more would spill registers; a tile's logits share one base), and
# of an unquantised low-bit tier.
EXACT_BLOCK, PLAIN_BLOCK = LOGIT_BLOCK, 32
SCORE_BLOCK = 1024
# Warps of a program of `attend_tiers`, see `triton_low_bit`. At d = 256, one warp spills registers in the exact tiers'
# loop. Two warps would not, but would run a fifth more instructions on the low-bit tier.
WARPS = 1
# Padded numbers of parts in `merge_splits`' registers. Sizes are few, since a growing cache compiles a kernel for each.
PART_SIZES = (8, 32, 128)
# The most parts; the most rounds of programs; the fewest 16-bit tiles that are worth a separate program.
MOST_PARTS, MOST_ROUNDS, FEWEST_TILES = PART_SIZES[-1], 4, 3
# Costs in units of a low-bit tile's instructions (tools/compile_kernels.py): a 16-bit tile, and a program's prologue
# and epilogue.
EXACT_TILE, PROLOGUE = 0.75, 1.5


@dataclass(frozen=True)
class Build:
    """Compiler options of `attend_tiers`, which determine the number of its concurrent programs.

    programs: programs per multiprocessor that the registers allow.
    shared: bytes of shared memory per program, including the driver's part.
    stages: number of tiles in flight; 1 relies on other programs to hide loads.
    registers: limit per thread, or None.
    """

    programs: int
    shared: int
    stages: int = 3
    registers: int | None = None

    @property
    def options(self) -> dict[str, int | None]:
        """The options by Triton's names."""
        return {"num_stages": self.stages, "maxnreg": self.registers}


# Instructions wait for their predecessors, and with eight programs a scheduler has only two warps. Measured on an H200
# for the halves of a corrected step: sixteen programs are faster, and for trellis values this helps more than loading
# ahead. Keys then spill registers outside their loop only. Other sizes use all registers.
WHOLE, PLAIN_VALUES = Build(8, 20 << 10), Build(8, 20 << 10, stages=1)
KEYS_ALONE, TRELLIS_ALONE = Build(16, 8 << 10, registers=128), Build(16, 3 << 10, stages=1)
MOST_CHANNELS, MOST_KEY_BITS = 128, 2


@triton.jit
def attend_exact(
    # For attend_tiers' rows [ROWS]: pointers to q, the mask's row, the logits, their base and the sums; which rows are
    # real, which keep their logits, and each row's lane.
    q_row, mask_row, logits_row, base_row, out_row, real, kept, lane,
    # The KV head's index in [B, H]; the numbers of cached tokens, of low-bit tokens, and of candidates; share `split`
    # of `splits`.
    bh, length, low_bit, candidates, split, splits,
    # As in attend_tiers, but k and v at this head's first new token.
    recent, slots, slot_index, sink_pairs, sink_row, k_row, v_row, k_lane, v_lane, mask, m_token, scale, softcap,
    d: tl.constexpr, window: tl.constexpr, top_k: tl.constexpr, sink_tokens: tl.constexpr, lanes: tl.constexpr,
    stored: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, MASK: tl.constexpr, CAP: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend over a share of the 16-bit pairs: slots, recent ring, new pairs, sink tokens.

    Stores sums, returns peak and total. attend_tiers has the bytes and FLOPs.
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
        # Order: slots, recent ring, new pairs of the lanes, sinks. Compute each pair's pointer and token index.
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
        # Only the new pairs are causal. Triton 3.9's interpreter broadcasts no scalar here, so compare positions.
        others = (place < (before_sinks - 1) * EXACT) | (place >= before_sinks * EXACT)
        causal = others[None, :] | (within[None, :] <= lane[:, None])
        seen = real[:, None] & shown(there, mask, tokens * m_token, MASK)[None, :] & causal
        logits = biased(logits, mask, mask_row[:, None] + (tokens * m_token)[None, :], seen, MASK)
        highest = tl.max(logits, 1)
        if KEYS and stored > 0:
            base = tl.zeros([ROWS], tl.float32)
            if not VALUES:  # only the ring is scored, since there are no slots
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
    # q [B, Hq, lanes, d]; turned: q rotated and contiguous, unused without rotation; k and v [B, H, lanes, d], the new
    # pairs; mask [B, Hq, lanes, > n] uint8 or additive, unused without a mask; cursor int64 [B, 4].
    q, turned, k, v, mask, cursor,
    # The low-bit tier: codes [B, H, C, w] uint8, viewed as [..., w/2] int16 if spans are even, or [..., 2·d] of q's
    # dtype; key_params [B, H, C/g, 2, d] and value_params [B, H, C, 2, d/gv]: scale, then zero, in this dtype or in 8
    # bits (for the trellis code scales [B, H, C/g, 1, g] and [B, H, C, 1, 1]). Tiers are contiguous.
    codes, key_params, value_params,
    # recent [B, H, W, 2, d], sink_pairs [B, H, s, 2, d] and sink_index [B, 1, s] int32 (-1: none), slots
    # [B, H, k, 2, d], slot_index [B, H, k] int32 (-1: empty).
    recent, sink_pairs, sink_index, slots, slot_index,
    # shares [B, Hq, lanes, share_columns] float32: the center's shares, per token, or per group of a stepped center;
    # unused if keys are not centered.
    shares,
    # Written if KEYS, else the low-bit tier's are read: logits [B, Hq, stored, C], 16-bit or float32; in a half also
    # their base [B, Hq, stored, C/16] float32.
    logits, base,
    # Written: out [B·H, E + S, ROWS, d] if VALUES; peaks and totals [B·H, E + S, ROWS] float32.
    out, peaks, totals,
    # Strides of q [B, Hq, lanes, d], of k and v [B, H, lanes, d], and of the mask [B, Hq, lanes, tokens], 0 for
    # broadcast dimensions.
    q_batch, q_head, q_lane, k_batch, k_head, k_lane, v_batch, v_head, v_lane, m_batch, m_head, m_row, m_token,
    scale, softcap,
    # H; C in tokens; columns of the cursor and of the center's shares; E and S, the shares of the exact and of the
    # low-bit tiers; the first share of this launch.
    heads, capacity, columns, share_columns, exact, splits, first,
    d: tl.constexpr, key_bits: tl.constexpr, value_bits: tl.constexpr, group: tl.constexpr, value_group: tl.constexpr,
    window: tl.constexpr, top_k: tl.constexpr, sink_tokens: tl.constexpr, lanes: tl.constexpr, queries: tl.constexpr,
    stored: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ROTATED: tl.constexpr, CENTERED: tl.constexpr,
    MASK: tl.constexpr, CAP: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, SPAN: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, KEY_CIRCLE: tl.constexpr, CIRCLE: tl.constexpr,
    PAGED: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """One program: all lanes and query heads of one KV head, over a share of its tiers.

    queries: G. stored: number of last lanes, which keep their logits. KEYS: compute the low-bit logits, else load
    them. VALUES: compute sums. ROTATED: the low-bit tier is rotated. CENTERED: rows of its center.
    MASK: NO_MASK, BOOL_MASK, ADDITIVE_MASK, PADDING. CAP: with a softcap. ROWS, CHANNELS: G·lanes and d, padded; row r
    is lane r % lanes of query head r // lanes. SPAN, KEY_CIRCLE, CIRCLE: see triton_low_bit. EXACT: 16-bit pairs per
    tile, and tokens per base. SHARES: the kinds of shares in the launch.

    Bytes read per KV head: n·(w + 4·d/g + 4·d/gv) of the low-bit tier, 4·d·(W + k + s + lanes) of 16-bit pairs. Bytes
    written: 2·G·n of logits, 4·(d + 2)·ROWS per split. FLOPs: 4·G·lanes·d per token, plus less than half of that for
    zero points. A half reads only its codes and scales, and `kept_logits.bytes_of_logit`·G·lanes·n bytes of logits.
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
    # attend_tiers' sums, float32: partial [B·H, parts, ROWS, d] if VALUES; peaks and totals [B·H, parts, ROWS];
    # sinks [Hq].
    partial, peaks, totals, sinks,
    # Written: out [B, Hq, lanes, d] in q's dtype if VALUES; lse [B, Hq, stored] float32 of the last lanes.
    out, lse,
    # E + S, E, Hq.
    parts, exact, query_heads,
    d: tl.constexpr, lanes: tl.constexpr, queries: tl.constexpr, stored: tl.constexpr, VALUES: tl.constexpr,
    SINKS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """One program: one query head and lane. Writes its output and its log-sum-exp.

    PARTS, CHANNELS: parts and d, padded. TURNED: channels rotated together in the low-bit parts, which follow the first
    E; 1: no rotation. Bytes: 4·(d + 2)·parts read, 2·d + 4 written. FLOPs: 2·d·parts + d·log2(TURNED).
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
    # logits [B, Hq, stored, C] and base [B, Hq, stored, C/16] from attend_tiers; lse [B, Hq, stored] float32;
    # mask [B, Hq, lanes, > n]; cursor int64 [B, 4]; sink_index [B, 1, s] int32.
    logits, base, lse, mask, cursor, sink_index,
    # Written: scores [stored, B, H, C] float32; -1: no candidate.
    scores,
    # Strides of the mask [B, Hq, lanes, tokens], 0 for broadcast dimensions.
    m_batch, m_head, m_row, m_token,
    # H, C in tokens, columns of the cursor.
    heads, capacity, columns,
    lanes: tl.constexpr, queries: tl.constexpr, stored: tl.constexpr, sink_tokens: tl.constexpr, MASK: tl.constexpr,
    BASE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a block of tokens of one KV head, for one of the last `stored` lanes. BASE: logits have a base per
    TOKENS tokens.

    Bytes per token: 2·G (4·G in float32), bases and mask read, 4 written. FLOPs: 3·G, a third of them exponentials.
    """
    bh, keeps = tl.program_id(0).to(tl.int64), tl.program_id(2)
    cursor += (bh // heads) * columns
    based = tl.program_id(1).to(tl.int64) * (BLOCK // TOKENS) + tl.arange(0, BLOCK // TOKENS)[:, None]
    tokens = based * TOKENS + tl.arange(0, TOKENS)[None, :]
    candidates = tl.minimum(tl.load(cursor + AT_NEXT_LOW_BIT), tl.load(cursor + AT_LENGTH))
    there = tokens < candidates
    # Load logits by whole bases: a mask on single tokens would split the loads.
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
    """The results of attend_tiers for merge_splits, which has the shapes.

    exact: number of parts of the exact tiers, which come first.
    partial, peaks, totals: of each part.
    """

    exact: int
    partial: Tensor
    peaks: Tensor
    totals: Tensor


# Logits, and their base in a half: see `kept_logits.py`.
Kept = tuple[Tensor, Tensor | None]
# A mask's kind, the tensor that a kernel loads, and its strides: see `mask_form`.
MaskForm = tuple[int, Tensor | None, dict[str, int]]


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, cursor: Tensor, slots: Tensor,
    slot_index: Tensor, tiers: Sequence[Tensor], layout: Sequence[int], scale: float, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `attention_ops.decode_attention`; the device reads all lengths, so that the step can be captured."""
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
    """Launch `attend_tiers`, whole or half of it. Without `values`, slots and slot_index are unused.

    Args:
        kept: the last lanes' logits, and their base in a half.
        group: tokens per tile: g, or without `keys` a divisor of g.
        keys, values: the halves to compute.
        chosen: tokens that a correction copies to the slots. A separate launch attends to the other low-bit tokens.
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
    """Return the build of `attend_tiers` for these shares of the low-bit tier; 16-bit shares alone use WHOLE.

    rows: ROWS. dtype: dtype of q.
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
    """Launch `merge_splits`; returns the output [B, Hq, lanes, d] in q's dtype (empty without `values`), and the
    log-sum-exp [B, Hq, stored] of the last lanes."""
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
    """Launch `score_tokens`; returns [stored, B, H, C] for the lanes with kept logits."""
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
    """Return the mask's kind, the tensor that the kernel loads, and the mask's strides by the kernels' parameter names.

    Strides are over [B, Hq, rows, n], 0 for broadcast dimensions. rows: number of lanes, or of new tokens.
    """
    names = ("m_batch", "m_head", "m_row", "m_token")
    if mask is None:
        return NO_MASK, None, dict.fromkeys(names, 0)
    strides = dict(zip(names, mask.expand(batch, query_heads, rows, mask.shape[-1]).stride(), strict=True))
    if mask.dtype == torch.bool:
        return PADDING if mask.shape[1] == mask.shape[2] == 1 else BOOL_MASK, mask.view(torch.uint8), strides
    return ADDITIVE_MASK, mask, strides


def exact_blocks(top_k: int, window: int, sink_tokens: int) -> int:
    """Return the largest number of tiles in the exact tiers: slots, ring, new pairs, sinks."""
    return sum(triton.cdiv(size, EXACT_BLOCK) for size in (top_k, window, sink_tokens)) + 1


@functools.cache
def shares_of(rows: int, tiles: int, blocks: int, slots: int, apart: int | None = None) -> tuple[int, int]:
    """Return E and S, the numbers of shares of a head's exact tiers and of its low-bit tier.

    E is the largest number of shares with at least three tiles that fills at most a quarter of the GPU, over all heads.
    S minimises the end time, among numbers with at least four tiles per share and a few rounds of programs.

    Args:
        rows: B·H.
        tiles: tiles in the low-bit tier.
        blocks: 16-bit tiles in the exact tiers.
        slots: number of programs that the GPU runs concurrently.
        apart: the same for exact shares in a separate launch; None if one launch has both kinds.
    """
    room = slots // 4 if apart is None else apart
    exact = max(1, min(blocks // FEWEST_TILES, room // rows, MOST_PARTS // 2))
    first = [] if apart is not None else rows * exact * [PROLOGUE + EXACT_TILE * triton.cdiv(blocks, exact)]
    most = max(1, min(tiles // 4, MOST_PARTS - exact, MOST_ROUNDS * slots // rows))

    def end(splits: int) -> float:
        return makespan(slots, first + rows * splits * [PROLOGUE + triton.cdiv(tiles, splits)])

    return exact, min(range(1, most + 1), key=end)


def makespan(slots: int, programs: list[float]) -> float:
    """Return the end time of programs of these lengths, started in order with `slots` running concurrently."""
    ends = [0.0] * slots
    for length in programs:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


@functools.cache
def programs_at_once(device: torch.device, build: Build) -> int:
    """Return the number of programs of attend_tiers that the GPU's registers and shared memory hold.

    The interpreter, which runs programs sequentially, gets the number of two multiprocessors.
    """
    if device.type != "cuda":
        return 2 * WHOLE.programs
    properties = torch.cuda.get_device_properties(device)
    fit = min(build.programs, properties.shared_memory_per_multiprocessor // build.shared)
    return fit * properties.multi_processor_count
