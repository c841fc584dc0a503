"""Triton: the k tokens of largest score, exactly, in rounds of tiles that fit in registers.

The CUDA implementation of `tiers.select_topk`. Each program keeps the best k of one tile: the k-th largest key is found
by bisection, every turn one comparison an element and one count, with no sort and no histogram. It begins with the
sixteen octaves below the largest, and ends as soon as k are told from the rest. What the tiles keep is a shorter list
in the same order; rounds go on until one tile holds it. Ties go to the older token.
Bytes: the scores once, and a (k / tile)-th of them in each further round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specache_compile.kernels.state.triton_cursor import AT_LOW_BIT

# Elements per program: 4,096 keys are 32 registers of each of 128 threads.
TILE = 4096
# Places at a time that are told to be empty.
EMPTY = tl.constexpr(128)
# Between a float's bits and those of its 2**-16th: sixteen exponents.
OCTAVES = tl.constexpr(16 << 23)


@triton.jit(do_not_specialize=["tiles", "heads", "columns"])
def keep_best(
    # This round's list: scores [B·H, length] float32, and their tokens [B·H, length] int32, not read where FIRST: those
    # of the first list are its places. cursor int64 [B, 4], where LOW_BIT_ALONE.
    scores, tokens, cursor,
    # Written, the next round's: [B·H, tiles·selected] float32, not where LAST, and int32.
    kept_scores, kept_tokens,
    # Elements of a list, of them to keep a tile, tiles, H, and columns of the cursor.
    length, selected, tiles, heads, columns,
    FIRST: tl.constexpr, LAST: tl.constexpr, LOW_BIT_ALONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of one head's list: its best `selected` by score, in the list's order; the rest of the places get -1.
    LOW_BIT_ALONE, of a first list: only what is in the low-bit tier already.

    Bytes an element: 4 read, and 8·selected / BLOCK written and, of the tokens, read. Integer operations: 2 for each turn
    of the bisection, some 15 of them where scores are attention (at most 31), and a few.
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    within = tl.arange(0, BLOCK)
    at = tile * BLOCK + within
    score = tl.load(scores + row * length + at, at < length, -1.0)
    if LOW_BIT_ALONE:
        score = tl.where(at < tl.load(cursor + row // heads * columns + AT_LOW_BIT), score, -1.0)
    # Floats that are not negative are in the order of their bits; -1 stands below them all.
    key = tl.where(score >= 0.0, score.to(tl.int32, bitcast=True), -1)
    # `low` is a key that enough reach, or all that are candidates; `high` one that too few do.
    low, reach = tl.zeros([], tl.int32), tl.sum((key >= 0).to(tl.int32), 0)
    high = tl.max(key, 0) + 1
    middle = tl.maximum(high - OCTAVES, 1)
    while (reach > selected) & (high - low > 1):
        count = tl.sum((key >= middle).to(tl.int32), 0)
        enough = count >= selected
        reach = tl.where(enough, count, reach)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        middle = low + (high - low) // 2
    chosen = key >= low
    if reach > selected:  # equal scores at the border: the older tokens
        above, tied = key > low, key == low
        room = selected - tl.sum(above.to(tl.int32), 0)
        chosen = above | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= room))
    place = (row * tiles + tile) * selected + tl.cumsum(chosen.to(tl.int32), 0) - 1
    token = at
    if not FIRST:
        token = tl.load(tokens + row * length + at, chosen, -1)
    tl.store(kept_tokens + place, token, chosen)
    count = tl.sum(chosen.to(tl.int32), 0)
    if not LAST:
        tl.store(kept_scores + place, score, chosen)
    for start in range(0, selected, EMPTY):
        empty = start + tl.arange(0, EMPTY)
        left = (empty >= count) & (empty < selected)
        tl.store(kept_tokens + (row * tiles + tile) * selected + empty, -1, left)
        if not LAST:
            tl.store(kept_scores + (row * tiles + tile) * selected + empty, -1.0, left)


def select_topk(scores: Tensor, selected: Tensor, cursor: Tensor | None = None) -> None:
    """As `tiers.select_topk`; the chosen tokens come in rising order. With a cursor: of the low-bit tier alone."""
    count = selected.shape[-1]
    if count == 0:
        return
    rows = scores.shape[0] * scores.shape[1]
    tile = max(TILE, triton.next_power_of_2(2 * count))  # a round at least halves the list
    tokens, first = selected, True
    while True:
        length = scores.shape[-1]
        tiles = triton.cdiv(length, tile)
        last = tiles == 1
        shape = (*selected.shape[:2], tiles * count)
        kept_tokens = selected if last else torch.empty(shape, dtype=torch.int32, device=scores.device)
        kept_scores = scores if last else torch.empty(shape, dtype=torch.float32, device=scores.device)
        block = min(tile, max(128, triton.next_power_of_2(length)))
        keep_best[rows, tiles](
            scores, tokens, tokens if cursor is None else cursor, kept_scores, kept_tokens,
            length=length, selected=count, tiles=tiles, heads=scores.shape[1],
            columns=0 if cursor is None else cursor.stride(0),
            FIRST=first, LAST=last, LOW_BIT_ALONE=first and cursor is not None, BLOCK=block,
            num_warps=max(1, min(8, block // 512)),
        )  # fmt: skip
        if last:
            return
        scores, tokens, first = kept_scores, kept_tokens, False
