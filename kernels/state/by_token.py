"""Access to the pairs of a whole cache by token, in pages (`Pages`) or in one tensor [B, H, C, 2, d]."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .cursor import runs_of
from .page_table import PAGE, Pages


def of_rows(pairs: Tensor | Pages, rows: slice) -> Tensor | Pages:
    """Return these batch rows of a tier as a view."""
    return Pages(pairs.pages, pairs.table[rows]) if isinstance(pairs, Pages) else pairs[rows]


def runs_of_pairs(lengths: Sequence[int], pairs: Tensor | Pages) -> list[tuple[slice, int]]:
    """Return runs of rows to process together, with lengths: adjacent rows of equal length; single rows in pages."""
    if isinstance(pairs, Pages):
        return [(slice(row, row + 1), length) for row, length in enumerate(lengths)]
    return runs_of(lengths)


def span_of(pairs: Tensor | Pages) -> int:
    """Return the number of contiguous tokens of a head: of a page, or of the whole tensor."""
    return PAGE if isinstance(pairs, Pages) else pairs.shape[2]


def aligned(pairs: Tensor | Pages, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield tokens `start` to `stop` in at most three parts: up to a page's end, whole pages, the rest."""
    if not isinstance(pairs, Pages):
        yield start, stop
        return
    first, last = -(-start // PAGE) * PAGE, stop // PAGE * PAGE
    edges = [start, first, last, stop] if first <= last else [start, stop]
    yield from ((begin, end) for begin, end in itertools.pairwise(edges) if begin < end)


def runs(pairs: Tensor | Pages, start: int, stop: int) -> Iterator[tuple[Tensor, int, int]]:
    """Yield tokens `start` to `stop` as views [B, H, n, 2, d] of one page each, with first and last token + 1.

    `Pages` must have one row.
    """
    if not isinstance(pairs, Pages):
        yield pairs[:, :, start:stop], start, stop
        return
    (table,) = pairs.table.tolist()
    for number in range(start // PAGE, -(-stop // PAGE)):
        first, page = number * PAGE, table[number]
        begin, end = max(start, first), min(stop, first + PAGE)
        yield pairs.pages[page : page + 1, :, begin - first : end - first], begin, end


def rows_of_pages(pairs: Pages) -> Iterator[Pages]:
    """Yield each row."""
    for row in range(pairs.table.shape[0]):
        yield Pages(pairs.pages, pairs.table[row : row + 1])


def tokens_of(pairs: Tensor | Pages, start: int, stop: int) -> Tensor:
    """Return tokens `start` to `stop` [B, H, n, 2, d], as a view if they are in one tensor or page, else as a copy."""
    if not isinstance(pairs, Pages):
        return pairs[:, :, start:stop]
    found = []
    for row in rows_of_pages(pairs):
        views = [view for view, _, _ in runs(row, start, stop)] or [pairs.pages[:1, :, :0]]
        found.append(views[0] if len(views) == 1 else torch.cat(views, 2))
    return found[0] if len(found) == 1 else torch.cat(found)


def put(pairs: Tensor | Pages, start: int, new: Tensor) -> None:
    """Write the pairs `new` [B, H, n, 2, d] to the tokens from `start` on."""
    if not isinstance(pairs, Pages):
        pairs[:, :, start : start + new.shape[2]] = new
        return
    for row, source in zip(rows_of_pages(pairs), new.split(1), strict=True):
        for view, begin, end in runs(row, start, start + new.shape[2]):
            view.copy_(source[:, :, begin - start : end - start])


def picked(pairs: Tensor | Pages, row: Tensor, head: Tensor, token: Tensor, which: int | slice = slice(None)) -> Tensor:
    """Return the pairs [..., 2, d] of the tokens at integer tensors' indices, on the tier's device.

    which: 0 for keys alone, 1 for values alone, [..., d].
    """
    row, head, token = (x.to(pairs.device) for x in (row, head, token))
    if isinstance(pairs, Pages):
        page = pairs.table.to(pairs.device)[row, token // PAGE]
        return pairs.pages[page, head, token % PAGE, which]
    return pairs[row, head, token, which]
