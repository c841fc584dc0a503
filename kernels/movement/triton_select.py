"""Triton: `tier_ops.select_topk`, the exact k tokens of largest score, in rounds of tiles that fit in registers.

Each program keeps the best k of one tile. The kept elements form a shorter list in the same order, until one tile holds
it. Ties go to the older token. Bytes: the scores once, and a (k / tile)-th of them in each further round.
"""

# A program finds the k-th largest key by bisection, with one comparison per element and one count per iteration. This
# starts with the sixteen octaves below the largest key, and ends as soon as k keys are separated.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements per program: 4,096 keys are 32 registers of each of 128 threads.
TILE = 4096
# Difference between the bits of a float and of its 2**-16th: sixteen exponents.
OCTAVES = tl.constexpr(16 << 23)


@triton.jit
def key_of(score):
    """Return int32 keys in the order of scores; non-negative floats have the order of their bits. -1: no candidate."""
    return tl.where(score >= 0.0, score.to(tl.int32, bitcast=True), -1)


@triton.jit
def threshold(key, selected, most):
    """Return a key that at least `selected` and at most `most` elements reach, and their number.

    With fewer candidates the key is 0; equal keys can make the number larger than `most`.
    """
    # Enough elements (or all candidates) are at least `low`; too few are at least `high`.
    low, reach = tl.zeros([], tl.int32), tl.sum((key >= 0).to(tl.int32), 0)
    high = tl.max(key, 0) + 1
    middle = tl.maximum(high - OCTAVES, 1)
    while (reach > most) & (high - low > 1):
        count = tl.sum((key >= middle).to(tl.int32), 0)
        enough = count >= selected
        reach = tl.where(enough, count, reach)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        middle = low + (high - low) // 2
    return low, reach


@triton.jit
def best_of(key, selected):
    """Return which elements are the `selected` largest keys; among equal keys at the border, the first ones."""
    low, reach = threshold(key, selected, selected)
    chosen = key >= low
    if reach > selected:
        above, tied = key > low, key == low
        room = selected - tl.sum(above.to(tl.int32), 0)
        chosen = above | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= room))
    return chosen


@triton.jit(do_not_specialize=["tiles"])
def keep_best(
    # This round's list: scores [B·H, length] float32, and their tokens [B·H, length] int32, or None for the indices.
    scores, tokens,
    # Written, the next round's list: [B·H, tiles·selected] float32 and int32.
    kept_scores, kept_tokens,
    # Elements of a list; elements to keep per tile; tiles.
    length, selected, tiles,
    BLOCK: tl.constexpr, SELECTED: tl.constexpr,
):  # fmt: skip
    """One program: one tile of one head's list. It writes the best `selected` by score, in the list's order, then -1.

    SELECTED: selected, padded. Bytes per element: 4 read, 8·selected / BLOCK written and, for tokens, read. Integer
    operations: 2 per iteration of the bisection, of which attention scores need about 15 (at most 31).
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + row * length + at, at < length, -1.0)
    chosen = best_of(key_of(score), selected)
    token = at
    if tokens is not None:
        token = tl.load(tokens + row * length + at, chosen, -1)
    kept = (row * tiles + tile) * selected
    place = kept + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(kept_tokens + place, token, chosen)
    tl.store(kept_scores + place, score, chosen)
    fill_up(kept_scores + kept, kept_tokens + kept, tl.sum(chosen.to(tl.int32), 0), selected, SELECTED=SELECTED)


@triton.jit
def fill_up(kept_scores, kept_tokens, count, selected, SELECTED: tl.constexpr):
    """Write -1 to the elements of a list of `selected` after the first `count`."""
    left = tl.arange(0, SELECTED)
    tl.store(kept_scores + left, -1.0, (left >= count) & (left < selected))
    tl.store(kept_tokens + left, -1, (left >= count) & (left < selected))


def select_topk(scores: Tensor, selected: Tensor, tokens: Tensor | None = None) -> None:
    """Run `tier_ops.select_topk`, in ascending order of tokens: `keep_best` in rounds until one tile holds the list.

    tokens: those of the scores [B, H, n], int32 [B, H, n]; None for the indices.
    """
    count = selected.shape[-1]
    if count == 0:
        return
    rows = scores.shape[0] * scores.shape[1]
    tile = max(TILE, triton.next_power_of_2(2 * count))  # a round at least halves the list
    while True:
        length = scores.shape[-1]
        tiles = triton.cdiv(length, tile)
        shape = (*selected.shape[:2], tiles * count)
        kept_tokens = selected if tiles == 1 else torch.empty(shape, dtype=torch.int32, device=scores.device)
        kept_scores = torch.empty(shape, dtype=torch.float32, device=scores.device)
        block = min(tile, max(128, triton.next_power_of_2(length)))
        keep_best[rows, tiles](
            scores, tokens, kept_scores, kept_tokens, length=length, selected=count, tiles=tiles, BLOCK=block,
            SELECTED=triton.next_power_of_2(count), num_warps=max(1, min(8, block // 512)),
        )  # fmt: skip
        if tiles == 1:
            return
        scores, tokens = kept_scores, kept_tokens
