"""The pairs of a whole cache by their tokens, whether they lie in one piece or in segments.

    in one piece    [B, H, C, 2, d]             a cache on the device: a head's tokens side by side
    in segments     [C/256, B, H, 256, 2, d]    the host tier: 256 tokens of all heads side by side
    in pages        `Pages`                     segments that lie apart, each row's by a table

Segments follow one another, so that a tier in segments grows behind what it has: nothing moves, and a GPU's driver pins
only what is new. Either way a head has runs of `span_of` tokens that are contiguous.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .cursor import runs_of
from .pages import PAGE, Pages

# Tokens of a segment.
SEGMENT = PAGE


def segmented(batch: int, heads: int, capacity: int, head_dim: int) -> tuple[int, ...]:
    """The shape of a tier in segments."""
    return (capacity // SEGMENT, batch, heads, SEGMENT, 2, head_dim)


def is_segmented(pairs: Tensor) -> bool:
    return pairs.dim() == 6


def of_rows(pairs: Tensor | Pages, rows: slice) -> Tensor | Pages:
    """Those batch rows of a tier, as a view."""
    if isinstance(pairs, Pages):
        return Pages(pairs.pages, pairs.table[rows])
    return pairs[:, rows] if is_segmented(pairs) else pairs[rows]


def runs_of_pairs(lengths: Sequence[int], pairs: Tensor | Pages) -> list[tuple[slice, int]]:
    """Rows that can be gone through together, and the length of each: neighbours that are alike; in pages, one."""
    if isinstance(pairs, Pages):
        return [(slice(row, row + 1), length) for row, length in enumerate(lengths)]
    return runs_of(lengths)


def span_of(pairs: Tensor | Pages) -> int:
    """How many tokens of a head are contiguous: token t of head bh is at ((t // span)·B·H + bh)·span + t % span; in
    pages, where the table says."""
    if isinstance(pairs, Pages):
        return SEGMENT
    return pairs.shape[-3]


def places_of(pairs: Tensor) -> int:
    """Tokens that there is a place for."""
    return pairs.shape[0] * SEGMENT if is_segmented(pairs) else pairs.shape[2]


def aligned(pairs: Tensor | Pages, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Tokens `start` to `stop` in three parts at most: up to a segment's end, whole segments, the rest."""
    if not isinstance(pairs, Pages) and not is_segmented(pairs):
        yield start, stop
        return
    first, last = -(-start // SEGMENT) * SEGMENT, stop // SEGMENT * SEGMENT
    edges = [start, first, last, stop] if first <= last else [start, stop]
    yield from ((begin, end) for begin, end in itertools.pairwise(edges) if begin < end)


def runs(pairs: Tensor | Pages, start: int, stop: int) -> Iterator[tuple[Tensor, int, int]]:
    """Tokens `start` to `stop` as views [B, H, n, 2, d], each of one segment, with its first token and its last + 1;
    in pages, of one row."""
    if not isinstance(pairs, Pages) and not is_segmented(pairs):
        yield pairs[:, :, start:stop], start, stop
        return
    for segment in range(start // SEGMENT, -(-stop // SEGMENT)):
        first = segment * SEGMENT
        begin, end = max(start, first), min(stop, first + SEGMENT)
        if isinstance(pairs, Pages):
            (page,) = pairs.table[:, segment].tolist()
            yield pairs.pages[page : page + 1, :, begin - first : end - first], begin, end
        else:
            yield pairs[segment, :, :, begin - first : end - first], begin, end


def tokens_of(pairs: Tensor | Pages, start: int, stop: int) -> Tensor:
    """Tokens `start` to `stop` [B, H, n, 2, d]: a view where they lie in one piece, a copy where not."""
    if isinstance(pairs, Pages):
        rows = (of_rows(pairs, slice(row, row + 1)) for row in range(pairs.table.shape[0]))
        nothing = pairs.pages[:1, :, :0]
        return torch.cat([torch.cat([nothing, *(view for view, _, _ in runs(row, start, stop))], 2) for row in rows])
    if not is_segmented(pairs):
        return pairs[:, :, start:stop]
    first, last = start // SEGMENT, -(-stop // SEGMENT)
    if last - first == 1:
        return pairs[first, :, :, start - first * SEGMENT : stop - first * SEGMENT]
    whole = pairs[first:last].permute(1, 2, 0, 3, 4, 5).flatten(2, 3)
    return whole[:, :, start - first * SEGMENT : stop - first * SEGMENT]


def put(pairs: Tensor | Pages, start: int, new: Tensor) -> None:
    """Write the pairs `new` [B, H, n, 2, d] as the tokens from `start` on."""
    for view, begin, end in runs(pairs, start, start + new.shape[2]):
        view.copy_(new[:, :, begin - start : end - start])


def picked(pairs: Tensor | Pages, row: Tensor, head: Tensor, token: Tensor, which: int | slice = slice(None)) -> Tensor:
    """The pairs [..., 2, d] of tokens that integer tensors name, or the keys (`which` 0) or values (1) alone [..., d];
    on the tier's device."""
    row, head, token = (x.to(pairs.device) for x in (row, head, token))
    if isinstance(pairs, Pages):
        page = pairs.table.to(pairs.device)[row, token // SEGMENT]
        return pairs.pages[page, head, token % SEGMENT, which]
    if is_segmented(pairs):
        return pairs[token // SEGMENT, row, head, token % SEGMENT, which]
    return pairs[row, head, token, which]
