"""Triton: select the exact k low-bit tokens of largest score from kept logits, in one launch that writes no scores.

`attention_ops.score_low_bit` keeps the logits, and a correction copies the selected pairs. Ties go to the older token.
"""

# Blocks of 16 tokens share a base, their largest logit, so that bases bound scores. A program has one KV head:
#
#     bound of a block   Σ over the query group of 2^(base - lse)
#     the best blocks    those of largest bound; their tokens' k-th best score bounds the head's from below
#     candidates         the blocks whose bound reaches it; the tokens of all others score less
#     the best k         of the candidates' tokens, in chunks that are merged with those kept before

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specache_compile.kernels.attention.kept_logits import LOGIT_BLOCK
from specache_compile.kernels.attention.triton_logits import block_scores, place_of_base, place_of_logit
from specache_compile.kernels.codes.records import RECORD
from specache_compile.kernels.decode.triton_decode import ADDITIVE_MASK, MASK_STRIDES, mask_form
from specache_compile.kernels.state.triton_cursor import AT_LOW_BIT

from .triton_select import best_of, fill_up, key_of, select_topk, threshold

BLOCK_TOKENS = tl.constexpr(LOGIT_BLOCK)
# Blocks per program, 16 for each of 512 threads. Blocks that are scored together, 8 tokens for each of 256 threads.
MOST_BLOCKS, MOST_SCORED = 8192, 128
# Registers per thread of a program of 8 warps, so that a multiprocessor has two.
REGISTERS = 128


@triton.jit
def list_blocks(found, block, listed):
    """Write the `listed` blocks [n] to `found` in their order; returns their number."""
    tl.debug_barrier()  # the last list has been read
    tl.store(found + tl.cumsum(listed.to(tl.int32), 0) - 1, block, listed)
    tl.debug_barrier()
    return tl.sum(listed.to(tl.int32), 0)


@triton.jit(do_not_specialize=[*MASK_STRIDES, "heads", "columns"])
def keep_best_of_logits(
    # logits [B, H, C/64, 2, 8, ROWS/2, 8] and base [B, H, C/64, 2, 4, ROWS/2] (`kept_logits.py`); lse [B, Hq, lanes]
    # float32 in log2 units, inf for a masked row; mask [B, Hq, lanes, ≥ n], if additive; cursor int64 [B, columns].
    logits, base, lse, mask, cursor,
    # Scratch: int32 [B, H, C/16]. Written: [B·H, tiles·selected] float32 and int32.
    found, kept_scores, kept_tokens,
    # Strides of the mask, 0 for broadcast dimensions; H; C in tokens; columns of the cursor; tokens to keep per tile.
    m_batch, m_head, m_row, m_token, heads, capacity, columns, selected,
    lanes: tl.constexpr, queries: tl.constexpr, ROWS: tl.constexpr, ADDITIVE: tl.constexpr, BLOCKS: tl.constexpr,
    SCORED: tl.constexpr, SELECTED: tl.constexpr,
):  # fmt: skip
    """One program: the best `selected` low-bit tokens of a tile of BLOCKS blocks of one KV head, in ascending order,
    then -1.

    ROWS: G·lanes, even. SCORED: blocks whose tokens are scored together. SELECTED: selected, padded. Bytes
    per low-bit token: G/4 of bases. Bytes per candidate token: 2·G of logits (4·G in float32). FLOPs per candidate
    token: 4·G, of which G are exponentials; candidates are a tenth of the tokens for logits of standard deviation 2.
    """
    bh, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = bh // heads, bh % heads
    logits += bh * capacity * ROWS
    base += bh * (capacity // BLOCK_TOKENS) * ROWS
    lse += bh * (queries * lanes)
    mask += batch * m_batch + head * queries * m_head
    found += bh * (capacity // BLOCK_TOKENS) + tile * BLOCKS
    kept = (bh * tl.num_programs(1) + tile) * selected
    kept_scores += kept
    kept_tokens += kept
    block = tile * BLOCKS + tl.arange(0, BLOCKS)
    there = block * BLOCK_TOKENS < tl.load(cursor + batch * columns + AT_LOW_BIT)
    bound = tl.zeros([BLOCKS], tl.float32)
    for query in tl.static_range(queries):
        row = query * lanes
        peak = tl.load(base + place_of_base(block, row, ROWS // 2), there, float("-inf"))
        bound += tl.exp2(peak - tl.load(lse + row))
    # Rounded up, also from numbers that are not normal, since exponentials are approximate.
    key = key_of(tl.where(there, bound * 1.0001 + 1.2e-38, -1.0))
    # The best blocks: half of FIRST are enough.
    FIRST: tl.constexpr = 2 * SELECTED if 2 * SELECTED < SCORED else SCORED
    least, reach = threshold(key, FIRST // 2, FIRST)
    list_blocks(found, block, key >= least)
    number = tl.arange(0, FIRST)
    best = tl.load(found + number, number < reach, 0)
    given = (logits, base, lse, mask, m_head, m_token)
    first_scores = block_scores(given, best, number < reach, 0, lanes, queries, ROWS // 2, ADDITIVE)
    key_of_best = key_of(tl.reshape(first_scores, [FIRST * BLOCK_TOKENS]))
    least, reach = threshold(key_of_best, selected, selected + selected // 4)
    count = list_blocks(found, block, key >= least)
    # Kept tokens take the place of the first blocks of a chunk.
    KEPT: tl.constexpr = SELECTED // BLOCK_TOKENS
    entry = tl.arange(0, SCORED)
    place = entry[:, None] * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[None, :]
    held = tl.zeros([], tl.int32)
    for start in range(0, count, SCORED - KEPT):
        at = start + entry - KEPT
        new = (entry >= KEPT) & (at < count)
        candidate = tl.load(found + at, new, 0)
        score = block_scores(given, candidate, new, 0, lanes, queries, ROWS // 2, ADDITIVE)
        token = candidate[:, None] * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[None, :]
        score = tl.where(place < held, tl.load(kept_scores + place, place < held, 0.0), score)
        token = tl.where(place < held, tl.load(kept_tokens + place, place < held, 0), token)
        flat = tl.reshape(score, [SCORED * BLOCK_TOKENS])
        chosen = best_of(key_of(flat), selected)
        rank = tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.debug_barrier()  # kept elements are loaded before others overwrite them
        tl.store(kept_scores + rank, flat, chosen)
        tl.store(kept_tokens + rank, tl.reshape(token, [SCORED * BLOCK_TOKENS]), chosen)
        held = tl.sum(chosen.to(tl.int32), 0)
        tl.debug_barrier()
    fill_up(kept_scores, kept_tokens, held, selected, SELECTED=SELECTED)


@triton.jit
def hide_tokens(
    # logits as in keep_best_of_logits, mutated; tokens [B·H, count] int32 (-1: none).
    logits, tokens, capacity, count, ROWS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """One program: set the kept logits of one head's tokens to -inf. COUNT: count, padded. Bytes per token: 4 read,
    2·ROWS written (4·ROWS in float32)."""
    bh, entry = tl.program_id(0).to(tl.int64), tl.arange(0, COUNT)
    token = tl.load(tokens + bh * count + entry, entry < count, -1)
    for row in tl.static_range(ROWS):
        tl.store(logits + bh * capacity * ROWS + place_of_logit(token, row, ROWS // 2), float("-inf"), token >= 0)


def select(
    logits: Tensor, base: Tensor, lse: Tensor, mask: Tensor | None, cursor: Tensor, selected: Tensor
) -> None:  # fmt: skip
    """Write the low-bit tokens of lane 0's largest scores to `selected` [B, H, k], in ascending order, then -1.

    One launch selects among 128k tokens. A score is the attention to a token, summed over the query group. Sinks and
    tokens that the mask hides from every query head are no candidates.
    """
    batch, heads, count = selected.shape
    if count == 0:
        return
    query_heads, lanes = lse.shape[1:]
    capacity = logits.shape[2] * RECORD
    size = max(LOGIT_BLOCK, triton.next_power_of_2(count))
    blocks = min(MOST_BLOCKS, triton.next_power_of_2(capacity // LOGIT_BLOCK))
    scored = max(min(MOST_SCORED, 2 * blocks), size // 8)
    tiles = triton.cdiv(capacity // LOGIT_BLOCK, blocks)
    found = selected.new_empty((batch, heads, capacity // LOGIT_BLOCK))
    kept_tokens = selected if tiles == 1 else selected.new_empty((batch, heads, tiles * count))
    kept_scores = lse.new_empty((batch, heads, tiles * count))
    kind, mask, strides = mask_form(mask, lse)
    keep_best_of_logits[batch * heads, tiles](
        logits, base, lse, mask, cursor, found, kept_scores, kept_tokens,
        **strides, heads=heads, capacity=capacity, columns=cursor.stride(0), selected=count, lanes=lanes,
        queries=query_heads // heads, ROWS=2 * logits.shape[5], ADDITIVE=kind == ADDITIVE_MASK, BLOCKS=blocks,
        SCORED=scored, SELECTED=size,
        num_warps=max(1, min(16, max(scored // 16, blocks // 512))), maxnreg=REGISTERS,
    )  # fmt: skip
    if tiles > 1:
        select_topk(kept_scores, selected, kept_tokens)


def hide(logits: Tensor, tokens: Tensor) -> None:
    """Set the kept logits of tokens int32 [B, H, n] (-1: none) to -inf, as when their pairs are in the slots."""
    batch, heads, count = tokens.shape
    if count == 0:
        return
    hide_tokens[(batch * heads,)](
        logits, tokens, capacity=logits.shape[2] * RECORD, count=count, ROWS=2 * logits.shape[5],
        COUNT=triton.next_power_of_2(count), num_warps=1 if count <= 128 else 4,
    )  # fmt: skip
