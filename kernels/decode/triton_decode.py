"""Triton: what the kernels of a decode step share: their inputs, their sums over splits of the cache, and scores.

`triton_scored` launches them.
"""

# merge_splits   (B·Hq·lanes)             output and log-sum-exp over all splits and the sink
# score_tokens   (B·H, C / 1024, lanes)   Σ over the query group of exp2(logit - lse)
#
# Shapes: B rows, H KV heads, Hq query heads, G = Hq / H, R = G·lanes query rows of a KV head, n cached tokens, capacity
# of C tokens, s sink tokens, d channels. Row r is lane r % lanes of query head r // lanes. Logits and their sums are in
# log2 units. Strides are in elements; channels are contiguous.

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specache_compile.kernels.attention.kept_logits import LOGIT_BLOCK, row_pairs
from specache_compile.kernels.attention.triton_logits import LOG2E, block_scores, finite
from specache_compile.kernels.codes.records import RECORD
from specache_compile.kernels.state.layout import Layout, StoredTiers, rotation_block
from specache_compile.kernels.state.operands import AttentionInputs
from specache_compile.kernels.state.triton_cursor import AT_LENGTH, AT_NEXT_LOW_BIT
from specache_compile.kernels.state.triton_pairs import hadamard, sinks_among

PER_BASE = tl.constexpr(LOGIT_BLOCK)
# Kinds of masks in a kernel; padding is a bool mask with one row for all heads and lanes.
NO_MASK, BOOL_MASK, ADDITIVE_MASK, PADDING = range(4)
# Do not let Triton specialise on values that grow with the cache (divisible by 16, equal to 1), such as these strides
# and the numbers of splits: it would recompile during generation.
MASK_STRIDES = ("m_batch", "m_head", "m_row")
# Query rows in a tensor core instruction; the fewest channels of a product.
FEWEST_ROWS, FEWEST_CHANNELS = 8, 16
# Tokens in a tile of 16-bit pairs, which share a base, and per program of `score_tokens`.
EXACT_BLOCK, SCORE_BLOCK = LOGIT_BLOCK, 1024
# Padded numbers of parts in `merge_splits`' registers. Sizes are few, since a growing cache compiles a kernel for each.
PART_SIZES = (8, 32, 128)
# The most splits of the low-bit tier, and of the 16-bit pairs; the most rounds of programs; the fewest tiles per split.
MOST_SPLITS, MOST_EXACT, MOST_ROUNDS, FEWEST_TILES = 96, 32, 4, 3
# Instructions of a program's prologue and epilogue, in units of a record's (tools/compile_kernels.py).
PROLOGUE = 1.5


class Sums(NamedTuple):
    """A launch's sums over its splits, float32. An empty split has peak -inf and total 0.

    partial: Σ 2^(l - peak)·v, [B·H, splits, ROWS, d], or with 0 channels.
    peaks, totals: largest logit and Σ 2^(l - peak), [B·H, splits, ROWS].
    """

    partial: Tensor
    peaks: Tensor
    totals: Tensor


@triton.jit
def load_parts(sums, bh, row, parts, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Return the places, peaks and totals [PARTS] of a query row's splits."""
    part = tl.arange(0, PARTS)
    at = (bh * parts + part) * ROWS + row
    return at, tl.load(sums.peaks + at, part < parts, float("-inf")), tl.load(sums.totals + at, part < parts, 0.0)


@triton.jit
def sum_of(partial, at, parts, shrink, d: tl.constexpr, width, CHANNELS: tl.constexpr):
    """Return Σ over the splits of partial sums · shrink, float32 [CHANNELS]. width: channels of `partial`."""
    channel = tl.arange(0, CHANNELS)
    there = (tl.arange(0, at.shape[0]) < parts)[:, None] & (channel < d)[None, :]
    return tl.sum(tl.load(partial + at[:, None] * width + channel[None, :], there, 0.0) * shrink[:, None], 0)


@triton.jit(do_not_specialize=["parts", "exact_parts", "width"])
def merge_splits(
    # `Sums` of the low-bit tier and of the 16-bit pairs, with d channels; sinks [Hq], or None.
    low_bit, exact, sinks,
    # Written: out [B, Hq, lanes, d] in q's dtype if VALUES; lse [B, Hq, lanes] float32, inf for a masked row.
    out, lse,
    parts, exact_parts, width, query_heads,  # numbers of splits; channels of the low-bit tier's sums; Hq
    d: tl.constexpr, lanes: tl.constexpr, queries: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, EXACT: tl.constexpr, CHANNELS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """One program: one query row. Writes its output and its log-sum-exp.

    PARTS, EXACT, CHANNELS: numbers of splits and d, padded. TURNED: channels rotated together in the low-bit tier, or
    1. Bytes: 4·(d + 2) read per split, 2·d + 4 written. FLOPs: 2·d per split, and d·log2(TURNED).
    """
    number = tl.program_id(0).to(tl.int64)
    bh, row = number // (queries * lanes), number % (queries * lanes)
    at, peak, total = load_parts(low_bit, bh, row, parts, ROWS, PARTS)
    exact_at, exact_peak, exact_total = load_parts(exact, bh, row, exact_parts, ROWS, EXACT)
    highest = tl.maximum(tl.max(peak, 0), tl.max(exact_peak, 0))
    if sinks is not None:
        sink = tl.load(sinks + (bh * queries + row // lanes) % query_heads).to(tl.float32) * LOG2E
        highest = tl.maximum(highest, sink)
    base = finite(highest)
    shrink, exact_shrink = tl.exp2(peak - base), tl.exp2(exact_peak - base)
    whole = tl.sum(total * shrink, 0) + tl.sum(exact_total * exact_shrink, 0)
    if sinks is not None:
        whole += tl.exp2(sink - base)
    if VALUES:
        summed = sum_of(low_bit.partial, at, parts, shrink, d, width, CHANNELS)
        summed = hadamard(summed, TURNED)
        summed += sum_of(exact.partial, exact_at, exact_parts, exact_shrink, d, d, CHANNELS)
        channel = tl.arange(0, CHANNELS)
        result = tl.where(whole > 0, summed / whole, 0.0)
        tl.store(out + number * d + channel, result.to(out.dtype.element_ty), channel < d)
    tl.store(lse + number, tl.where(whole > 0, base + tl.log2(whole), float("inf")))


@triton.jit(do_not_specialize=[*MASK_STRIDES, "columns", "capacity"])
def score_tokens(
    # Kept logits and their base (`kept_logits.py`); lse [B, Hq, lanes]; mask [B, Hq, lanes, > n], read if additive;
    # cursor int64 [B, columns]; sink_index [B, 1, s] int32.
    logits, base, lse, mask, cursor, sink_index,
    # Written: scores [n, B, H, C] float32 of the last n lanes; -1: no candidate.
    scores,
    # Strides of the mask [B, Hq, lanes, tokens], 0 for broadcast dimensions; H; C in tokens; columns of the cursor.
    m_batch, m_head, m_row, m_token, heads, capacity, columns,
    lanes: tl.constexpr, queries: tl.constexpr, sink_tokens: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK tokens of one KV head, for one of the last lanes.

    Kept logits of tokens that a mask hides are -inf, and those of sinks in the low-bit tier. Bytes per token: 2·G (4·G
    in float32) and bases read, 4 written. FLOPs: 3·G, a third of them exponentials.
    """
    bh, keeps = tl.program_id(0).to(tl.int64), tl.program_id(2)
    batch, lane = bh // heads, lanes - tl.num_programs(2) + keeps
    cursor += batch * columns
    PAIRS: tl.constexpr = (queries * lanes + 1) // 2
    candidates = tl.minimum(tl.load(cursor + AT_NEXT_LOW_BIT), tl.load(cursor + AT_LENGTH))
    block = tl.program_id(1) * (BLOCK // PER_BASE) + tl.arange(0, BLOCK // PER_BASE)
    tokens = block[:, None] * PER_BASE + tl.arange(0, PER_BASE)[None, :]
    there = block * PER_BASE < candidates
    logits += bh * capacity * (2 * PAIRS)
    base += bh * (capacity // PER_BASE) * (2 * PAIRS)
    mask += batch * m_batch + bh % heads * queries * m_head + lane * m_row
    given = (logits, base, lse + bh * (queries * lanes), mask, m_head, m_token)
    score = block_scores(given, block, there, lane, lanes, queries, PAIRS, MASK == 2)
    seen = (tokens < candidates) & ~sinks_among(tokens, sink_index + batch * sink_tokens, sink_tokens=sink_tokens)
    at = (keeps * tl.num_programs(0) + bh) * capacity
    tl.store(scores + at + tokens, tl.where(seen, score, -1.0), tokens < capacity)


def merged(
    new: AttentionInputs, layout: Layout, low_bit: Sums, exact: Sums | None, lse: Tensor, values: bool = True
) -> Tensor:
    """Launch `merge_splits`; returns the output [B, Hq, lanes, d] in q's dtype (empty without `values`), and writes the
    log-sum-exp [B, Hq, lanes] in log2 units."""
    q, sinks, heads = new.q, new.sinks, new.k.shape[1]
    batch, query_heads, lanes, d = q.shape
    all_heads, parts, rows = low_bit.peaks.shape
    exact = exact or empty_sums(all_heads, 0, rows, 0, q.device)
    exact_parts = exact.peaks.shape[1]
    out = torch.empty(q.shape if values else (0,), dtype=q.dtype, device=q.device)
    merge_splits[(batch * query_heads * lanes,)](
        low_bit, exact, sinks, out, lse,
        parts=parts, exact_parts=exact_parts, width=low_bit.partial.shape[3], query_heads=query_heads, d=d, lanes=lanes,
        queries=query_heads // heads, VALUES=values, ROWS=rows,
        PARTS=part_size(parts), EXACT=part_size(exact_parts),
        CHANNELS=max(FEWEST_CHANNELS, triton.next_power_of_2(d)),
        TURNED=rotation_block(d) if layout.is_rotated else 1, num_warps=4,
    )  # fmt: skip
    return out


def scores_of(new: AttentionInputs, sink_index: Tensor, logits: Tensor, base: Tensor, lse: Tensor, last: int) -> Tensor:
    """Launch `score_tokens`; returns [last, B, H, C], the scores of the last lanes."""
    cursor, (batch, query_heads, lanes, _) = new.cursor, new.q.shape
    kind, mask, mask_strides = mask_form(new.mask, new.q)
    heads, capacity = logits.shape[1], logits.shape[2] * RECORD
    scores = logits.new_empty((last, batch, heads, capacity), dtype=torch.float32)
    score_tokens[batch * heads, triton.cdiv(capacity, SCORE_BLOCK), last](
        logits, base, lse, mask, cursor, sink_index, scores,
        **mask_strides, heads=heads, capacity=capacity, columns=cursor.stride(0), lanes=lanes,
        queries=query_heads // heads, sink_tokens=sink_index.shape[2], MASK=kind, BLOCK=SCORE_BLOCK, num_warps=4,
    )  # fmt: skip
    return scores


def contiguous_channels(new: AttentionInputs) -> AttentionInputs:
    """Return the inputs with a stride of 1 in the channels of q, k and v."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in new[:3])
    return new._replace(q=q, k=k, v=v)


def mask_form(mask: Tensor | None, q: Tensor) -> tuple[int, Tensor, dict[str, int]]:
    """Return the mask's kind, the tensor that a kernel loads, and the mask's strides by the kernels' parameter names.

    Strides are over [B, Hq, T, n] for a query [B, Hq, T, d], 0 for broadcast dimensions. Without a mask the tensor is
    the query, which no kernel reads as a mask.
    """
    names = ("m_batch", "m_head", "m_row", "m_token")
    if mask is None:
        return NO_MASK, q, dict.fromkeys(names, 0)
    strides = dict(zip(names, mask.expand(*q.shape[:3], mask.shape[-1]).stride(), strict=True))
    if mask.dtype == torch.bool:
        return PADDING if mask.shape[1] == mask.shape[2] == 1 else BOOL_MASK, mask.view(torch.uint8), strides
    return ADDITIVE_MASK, mask, strides


def group_of(tiers: StoredTiers) -> int:
    """Return g of a quantised tier."""
    return tiers.codes.shape[2] // tiers.key_params.shape[2]


def rows_of(q: Tensor, heads: int) -> int:
    """Return ROWS, the padded query rows of a KV head."""
    return max(FEWEST_ROWS, triton.next_power_of_2(2 * row_pairs(q, heads)))


def empty_sums(rows: int, splits: int, padded: int, channels: int, device: torch.device) -> Sums:
    """Allocate `Sums` of B·H = `rows` heads and ROWS = `padded` query rows."""
    shapes = (rows, splits, padded, channels), (rows, splits, padded), (rows, splits, padded)
    return Sums(*(torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes))


def part_size(parts: int) -> int:
    return next(size for size in PART_SIZES if parts <= size)


def splits_of(rows: int, tiles: int, device: torch.device, programs: int) -> int:
    """Return the number of splits of a head's low-bit tier, with so many `programs` at once on a multiprocessor."""
    return best_splits(rows, tiles, programs * multiprocessors(device))


@functools.cache
def best_splits(rows: int, tiles: int, slots: int) -> int:
    """Return the splits of each of B·H = `rows` heads with the earliest end, if the GPU runs `slots` programs at once.

    A split has at least four of a head's tiles, and programs run in a few rounds.
    """
    most = max(1, min(tiles // 4, MOST_SPLITS, MOST_ROUNDS * slots // rows))

    def end(splits: int) -> float:
        return triton.cdiv(rows * splits, slots) * (PROLOGUE + triton.cdiv(tiles, splits))

    return min(range(1, most + 1), key=end)


def exact_splits(rows: int, blocks: int, device: torch.device, programs: int) -> int:
    """Return the most splits of a head's 16-bit pairs in so many tiles: of three tiles each, all on the GPU at once."""
    return max(1, min(blocks // FEWEST_TILES, programs * multiprocessors(device) // rows, MOST_EXACT))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the GPU's multiprocessors; the interpreter, which runs programs sequentially, gets two."""
    return 2 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count
