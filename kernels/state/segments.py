"""Access to the pairs of a whole cache by token. A head has contiguous runs of `span_of` tokens in each layout."""

# contiguous      [B, H, C, 2, d]             a cache on the device
# in segments     [C/256, B, H, 256, 2, d]    the host tier: growing appends segments, and moves nothing
# in pages        `Pages`                     separate segments, which a row's table lists

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .cursor import runs_of
from .page_table import PAGE, Pages

# Tokens in a segment.
SEGMENT = PAGE


def segmented(batch: int, heads: int, capacity: int, head_dim: int) -> tuple[int, ...]:
    """Return the shape of a tier in segments."""
    return (capacity // SEGMENT, batch, heads, SEGMENT, 2, head_dim)


def is_segmented(pairs: Tensor) -> bool:
    return pairs.dim() == 6


def of_rows(pairs: Tensor | Pages, rows: slice) -> Tensor | Pages:
    """Return these batch rows of a tier as a view."""
    if isinstance(pairs, Pages):
        return Pages(pairs.pages, pairs.table[rows])
    return pairs[:, rows] if is_segmented(pairs) else pairs[rows]


def runs_of_pairs(lengths: Sequence[int], pairs: Tensor | Pages) -> list[tuple[slice, int]]:
    """Return runs of rows to process together, with lengths: adjacent rows of equal length; single rows in pages."""
    if isinstance(pairs, Pages):
        return [(slice(row, row + 1), length) for row, length in enumerate(lengths)]
    return runs_of(lengths)


def span_of(pairs: Tensor | Pages) -> int:
    """Return the number of contiguous tokens of a head.

    Token t of head bh is at ((t // span)·B·H + bh)·span + t % span; in pages, the table has its segment.
    """
    if isinstance(pairs, Pages):
        return SEGMENT
    return pairs.shape[-3]


def places_of(pairs: Tensor) -> int:
    """Return the capacity in tokens."""
    return pairs.shape[0] * SEGMENT if is_segmented(pairs) else pairs.shape[2]


def aligned(pairs: Tensor | Pages, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield tokens `start` to `stop` in at most three parts: up to a segment's end, whole segments, the rest."""
    if not isinstance(pairs, Pages) and not is_segmented(pairs):
        yield start, stop
        return
    first, last = -(-start // SEGMENT) * SEGMENT, stop // SEGMENT * SEGMENT
    edges = [start, first, last, stop] if first <= last else [start, stop]
    yield from ((begin, end) for begin, end in itertools.pairwise(edges) if begin < end)


def runs(pairs: Tensor | Pages, start: int, stop: int) -> Iterator[tuple[Tensor, int, int]]:
    """Yield tokens `start` to `stop` as views [B, H, n, 2, d] of one segment each, with first and last token + 1.

    `Pages` must have one row.
    """
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
    """Return tokens `start` to `stop` [B, H, n, 2, d], as a view if they are contiguous, else as a copy."""
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
    """Write the pairs `new` [B, H, n, 2, d] to the tokens from `start` on."""
    for view, begin, end in runs(pairs, start, start + new.shape[2]):
        view.copy_(new[:, :, begin - start : end - start])


def picked(pairs: Tensor | Pages, row: Tensor, head: Tensor, token: Tensor, which: int | slice = slice(None)) -> Tensor:
    """Return the pairs [..., 2, d] of the tokens at integer tensors' indices, on the tier's device.

    which: 0 for keys alone, 1 for values alone, [..., d].
    """
    row, head, token = (x.to(pairs.device) for x in (row, head, token))
    if isinstance(pairs, Pages):
        page = pairs.table.to(pairs.device)[row, token // SEGMENT]
        return pairs.pages[page, head, token % SEGMENT, which]
    if is_segmented(pairs):
        return pairs[token // SEGMENT, row, head, token % SEGMENT, which]
    return pairs[row, head, token, which]
