"""Triton: decode attention over the four tiers for all lanes, split over the cache, with the selection scores.

The CUDA implementation of `attention.decode_attention`, in three launches:

    attend_tiers   (B·H, splits + 1)   the first one slots, recent and new, the others a share of the low-bit tier each
    merge_splits   (B·Hq·lanes)        log-sum-exp over the splits and the sink
    score_tokens   (B·H, C / 1024)     Σ over the query group of exp(logit - lse) of the last lane

Bytes a token and head: 2·d·bits/8 of codes, 4·d/g + 4·d/gv of scales, 2·G written and read again for the scores.
The low-bit tier's loop is in `triton_low_bit`; one group of tokens is one tile there.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import SEEN, stored_bits
from .copy_queue import LENGTH, LOW_BIT, NEXT_LOW_BIT
from .triton_low_bit import attend_low_bit
from .triton_softmax import biased, capped, grown

AT_LENGTH, AT_LOW_BIT, AT_NEXT = tl.constexpr(LENGTH), tl.constexpr(LOW_BIT), tl.constexpr(NEXT_LOW_BIT)
# An additive mask below this hides its token.
HIDDEN = tl.constexpr(SEEN)
# What a mask is, as a kernel sees it.
NO_MASK, BOOL_MASK, ADDITIVE_MASK = range(3)
# The smallest sides of a product that fill a tensor core instruction: query rows, and channels.
FEWEST_ROWS, FEWEST_CHANNELS = 8, 16
# Pairs in 16 bits per tile: of the slots, the ring and the new ones (more would spill registers), and of a low-bit tier
# that is not quantised.
EXACT_BLOCK, PLAIN_BLOCK = 16, 32
SCORE_BLOCK = 1024
# Warps of a program of `attend_tiers`, see `triton_low_bit`, and the programs that a multiprocessor's registers hold at
# once; more splits than that only add partial results to merge.
WARPS = 1
PROGRAMS_PER_SM = 8
MOST_SPLITS = 128


@triton.jit
def attend_exact(
    q_row, mask_row, logits_row, out_row, real, last_lane, lane, bh, length, low_bit, candidates, recent, slots,
    slot_index, k_row, v_row, k_lane, v_lane, mask, m_token, scale, softcap,
    d: tl.constexpr, window: tl.constexpr, top_k: tl.constexpr, lanes: tl.constexpr, MASK: tl.constexpr,
    CAP: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Slots, the recent ring, and the lanes' new pairs, in 16 bits: stores their sums, returns peak and total."""
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
    for block in range(0, slot_blocks + recent_blocks + 1):
        # Slots, then the recent ring, then the new pairs of the lanes: where a pair lies, and its token's number.
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
        else:
            there = within < lanes
            tokens = length + tl.zeros_like(within)
            keys_at = k_row + within.to(tl.int64) * k_lane
            values_at = v_row + within.to(tl.int64) * v_lane
            scored = within < 0
        loaded = there[:, None] & inside[None, :]
        keys = tl.load(keys_at[:, None] + channel[None, :], loaded, 0.0)
        values = tl.load(values_at[:, None] + channel[None, :], loaded, 0.0)
        logits = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        logits = capped(logits * scale, softcap, CAP)
        causal = (block < slot_blocks + recent_blocks) | (within[None, :] <= lane[:, None])
        seen = real[:, None] & there[None, :] & causal
        logits = biased(logits, mask, mask_row[:, None] + (tokens * m_token)[None, :], seen, MASK)
        if top_k > 0:
            tl.store(logits_row[:, None] + tokens[None, :], logits, last_lane[:, None] & scored[None, :])
        weights, shrink, peak, total = grown(logits, peak, total)
        sums = tl.dot(weights.to(kind), values, sums * shrink[:, None], input_precision=PRECISION)
    tl.store(out_row[:, None] + channel[None, :], sums, real[:, None] & inside[None, :])
    return peak, total


@triton.jit
def attend_tiers(
    q, k, v, mask, cursor, codes, key_params, value_params, recent, slots, slot_index,
    logits_out, out, peaks, totals, scale, softcap, heads, capacity, splits,
    q_batch, q_head, q_lane, k_batch, k_head, k_lane, v_batch, v_head, v_lane, m_batch, m_head, m_lane, m_token,
    d: tl.constexpr, bits: tl.constexpr, group: tl.constexpr, value_group: tl.constexpr, window: tl.constexpr,
    top_k: tl.constexpr, lanes: tl.constexpr, queries: tl.constexpr, MASK: tl.constexpr, CAP: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, SPAN: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: all lanes and query heads of one KV head, over its share of the tiers."""
    bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = bh // heads, bh % heads
    length, low_bit = tl.load(cursor + AT_LENGTH), tl.load(cursor + AT_LOW_BIT)
    row = tl.arange(0, ROWS)
    real = row < queries * lanes
    lane = row % lanes
    query_head = head * queries + row // lanes
    q_row = q + batch * q_batch + query_head * q_head + lane * q_lane
    mask_row = batch * m_batch + query_head * m_head + lane * m_lane
    logits_row = logits_out + (batch * heads * queries + query_head) * capacity
    last_lane = real & (lane == lanes - 1)
    at = (bh * (splits + 1) + split) * ROWS + row

    out_row = out + at * d
    if split > 0:  # the exact tiers take longest, so they start first
        peak, total = attend_low_bit(
            q_row, mask_row, logits_row, out_row, real, last_lane, bh, low_bit, split - 1, splits, codes, key_params,
            value_params, slot_index, mask, m_token, scale, softcap, capacity,
            d, bits, group, value_group, top_k, MASK, CAP, ROWS, SPAN, PRECISION,
        )  # fmt: skip
    else:
        k_row, v_row = k + batch * k_batch + head * k_head, v + batch * v_batch + head * v_head
        candidates = tl.minimum(tl.load(cursor + AT_NEXT), length)
        peak, total = attend_exact(
            q_row, mask_row, logits_row, out_row, real, last_lane, lane, bh, length, low_bit, candidates, recent, slots,
            slot_index, k_row, v_row, k_lane, v_lane, mask, m_token, scale, softcap,
            d, window, top_k, lanes, MASK, CAP, ROWS, CHANNELS, EXACT, PRECISION,
        )  # fmt: skip
    tl.store(peaks + at, peak)
    tl.store(totals + at, total)


@triton.jit
def merge_splits(
    partial, peaks, totals, sinks, out, lse, parts, query_heads,
    d: tl.constexpr, lanes: tl.constexpr, queries: tl.constexpr, SINKS: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One program: one query head and lane. Writes its output and its log-sum-exp."""
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
    base = tl.where(highest == float("-inf"), 0.0, highest)
    shrink = tl.exp(peak - base)
    total = tl.sum(tl.load(totals + at, part < parts, 0.0) * shrink, 0)
    if SINKS:
        total += tl.exp(sink - base)
    there = (part < parts)[:, None] & (channel < d)[None, :]
    summed = tl.sum(tl.load(partial + at[:, None] * d + channel[None, :], there, 0.0) * shrink[:, None], 0)
    result = tl.where(total > 0, summed / total, 0.0)
    tl.store(out + number * d + channel, result.to(out.dtype.element_ty), channel < d)
    if row % lanes == lanes - 1:
        tl.store(lse + number // lanes, tl.where(total > 0, base + tl.log(total), float("inf")))


@triton.jit
def score_tokens(
    logits, lse, mask, cursor, scores, heads, capacity, m_batch, m_head, m_lane, m_token,
    lanes: tl.constexpr, queries: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a block of tokens of one KV head."""
    bh = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    candidates = tl.minimum(tl.load(cursor + AT_NEXT), tl.load(cursor + AT_LENGTH))
    there = tokens < candidates
    score = tl.zeros([BLOCK], tl.float32)
    seen = there
    if MASK != 0:
        seen = tokens < 0
    for query in tl.static_range(queries):
        number = bh * queries + query
        logit = tl.load(logits + number * capacity + tokens, there, float("-inf")).to(tl.float32)
        score += tl.exp(logit - tl.load(lse + number))
        at = (bh // heads) * m_batch + ((bh % heads) * queries + query) * m_head + (lanes - 1) * m_lane
        if MASK == 1:
            seen |= tl.load(mask + at + tokens * m_token, there, 0) != 0
        if MASK == 2:
            seen |= tl.load(mask + at + tokens * m_token, there, float("-inf")) > HIDDEN
    tl.store(scores + bh * capacity + tokens, tl.where(there & seen, score, -1.0), tokens < capacity)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, cursor: Tensor, codes: Tensor,
    key_params: Tensor, value_params: Tensor, recent: Tensor, slots: Tensor, slot_index: Tensor,
    scale: float, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `attention.decode_attention`; all lengths are read on the device, so that the step can be captured."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    batch, query_heads, lanes, d = q.shape
    heads, capacity, top_k = k.shape[1], codes.shape[2], slots.shape[2]
    bits = stored_bits(codes, d)
    quantized = bits < 16
    group = capacity // key_params.shape[2] if quantized else PLAIN_BLOCK
    value_group = d // value_params.shape[-1] if quantized else d
    queries = query_heads // heads
    rows = max(FEWEST_ROWS, triton.next_power_of_2(queries * lanes))
    splits = split_count(batch * heads, capacity // group, q.device)
    kind, mask, mask_strides = mask_form(mask, batch, query_heads, lanes)
    channels = max(FEWEST_CHANNELS, triton.next_power_of_2(d))
    span = math.gcd(d * bits // 8, value_group) if quantized else d
    if quantized and span % 2 == 0:
        codes = codes.view(torch.int16)

    new = functools.partial(torch.empty, device=q.device)
    out, scores = new(q.shape, dtype=q.dtype), new((batch, heads, capacity), dtype=torch.float32)
    # Half precision ranks as well as the model's own dtype does, at half the bytes of float32.
    logits = new(
        (batch, query_heads, capacity if top_k else 0), dtype=torch.float32 if q.dtype == torch.float32 else torch.half
    )
    partial = new((batch * heads, splits + 1, rows, d), dtype=torch.float32)
    peaks, totals = (new((batch * heads, splits + 1, rows), dtype=torch.float32) for _ in range(2))
    lse = new((batch, query_heads), dtype=torch.float32)

    attend_tiers[batch * heads, splits + 1](
        q, k, v, q if mask is None else mask, cursor, codes, key_params, value_params, recent, slots, slot_index,
        logits, partial, peaks, totals, scale, softcap or 1.0, heads, capacity, splits,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *mask_strides,
        d, bits, group, value_group, recent.shape[2], top_k, lanes, queries, kind, softcap is not None,
        rows, channels, span, EXACT_BLOCK, "ieee" if q.dtype == torch.float32 else "tf32", num_warps=WARPS,
    )  # fmt: skip
    merge_splits[(batch * query_heads * lanes,)](
        partial, peaks, totals, q if sinks is None else sinks, out, lse, splits + 1, query_heads,
        d, lanes, queries, sinks is not None, rows, triton.next_power_of_2(splits + 1), channels, num_warps=4,
    )  # fmt: skip
    if top_k:
        score_tokens[batch * heads, triton.cdiv(capacity, SCORE_BLOCK)](
            logits, lse, q if mask is None else mask, cursor, scores, heads, capacity, *mask_strides,
            lanes, queries, kind, SCORE_BLOCK, num_warps=4,
        )  # fmt: skip
    else:
        scores.fill_(-1.0)
    return out, scores


def mask_form(
    mask: Tensor | None, batch: int, query_heads: int, lanes: int
) -> tuple[int, Tensor | None, tuple[int, ...]]:
    """The mask's kind, what the kernel loads, and its strides over [B, Hq, lanes, n]; 0 where it is broadcast."""
    if mask is None:
        return NO_MASK, None, (0, 0, 0, 0)
    strides = mask.expand(batch, query_heads, lanes, mask.shape[-1]).stride()
    if mask.dtype == torch.bool:
        return BOOL_MASK, mask.view(torch.uint8), strides
    return ADDITIVE_MASK, mask, strides


def split_count(rows: int, tiles: int, device: torch.device) -> int:
    """Shares of the low-bit tier: enough programs for every multiprocessor, none with fewer than four tiles."""
    programs = PROGRAMS_PER_SM * multiprocessors(device)
    return max(1, min(programs // rows, tiles // 4, MOST_SPLITS))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of the GPU; two in the interpreter, which runs one program after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
