"""Access to the pairs of a whole cache by token, in `Pages`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from .page_table import PAGE, Pages


def aligned(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield tokens `start` to `stop` in at most three parts: up to a page's end, whole pages, the rest."""
    first, last = -(-start // PAGE) * PAGE, stop // PAGE * PAGE
    edges = [start, first, last, stop] if first <= last else [start, stop]
    yield from ((begin, end) for begin, end in itertools.pairwise(edges) if begin < end)


def runs(pairs: Pages, start: int, stop: int) -> Iterator[tuple[Tensor, int, int]]:
    """Yield tokens `start` to `stop` of one row as views [1, H, n, 2, d] of one page each, with first and last token
    + 1."""
    (table,) = pairs.table.tolist()
    for number in range(start // PAGE, -(-stop // PAGE)):
        first, page = number * PAGE, table[number]
        begin, end = max(start, first), min(stop, first + PAGE)
        yield pairs.pages[page : page + 1, :, begin - first : end - first], begin, end


def rows_of_pages(pairs: Pages) -> Iterator[Pages]:
    """Yield each row."""
    for row in range(pairs.table.shape[0]):
        yield Pages(pairs.pages, pairs.table[row : row + 1])


def tokens_of(pairs: Pages, start: int, stop: int) -> Tensor:
    """Return tokens `start` to `stop` [B, H, n, 2, d], as a view if one row has them in one page, else as a copy."""
    found = []
    for row in rows_of_pages(pairs):
        views = [view for view, _, _ in runs(row, start, stop)] or [pairs.pages[:1, :, :0]]
        found.append(views[0] if len(views) == 1 else torch.cat(views, 2))
    return found[0] if len(found) == 1 else torch.cat(found)


def put(pairs: Pages, start: int, new: Tensor) -> None:
    """Write the pairs `new` [B, H, n, 2, d] to the tokens from `start` on."""
    for row, source in zip(rows_of_pages(pairs), new.split(1), strict=True):
        for view, begin, end in runs(row, start, start + new.shape[2]):
            view.copy_(source[:, :, begin - start : end - start])


def pairs_at(pairs: Pages, row: Tensor, head: Tensor, token: Tensor, which: int | slice = slice(None)) -> Tensor:
    """Return the pairs [..., 2, d] of the tokens at integer tensors' indices, on the tier's device.

    which: 0 for keys alone, 1 for values alone, [..., d].
    """
    row, head, token = (x.to(pairs.device) for x in (row, head, token))
    page = pairs.table.to(pairs.device)[row, token // PAGE]
    return pairs.pages[page, head, token % PAGE, which]
