"""Pages of 256 tokens of all heads. A row's table lists its pages by number, so that rows can share pages.

Token t of a row is token t mod 256 of page `table[t // 256]`. The table follows the row's lengths in the cursor, int64
[rows, 3 + C/256].
"""

# A tier in pages has the shape of P rows with 256 tokens each:
#     codes       [P, H, 256, w]          key_params   [P, H, 256/g, 2, d]       value_params   [P, H, 256, 2, d/gv]
#     host and full_cache    [P, H, 256, 2, d]
# All other state tensors have rows. Table entries without tokens name page 0. In the pool of a `Batch` it is the null
# page, to which padding rows write (`lowering/row_buckets.py`).

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .cursor import CURSOR_SIZE, LOW_BIT, NEXT_LOW_BIT, host_record
from .stored_pairs import joined, parts_of, write

# Tokens in a page; every capacity is a multiple.
PAGE = 256
# Operands of the ops in pages: definitions copy the low-bit tier to rows, and read others by token (`by_rows`).
LOW_BIT_TIER = ("codes", "key_params", "value_params")
# The operand of attention that is a list of state tensors; the low-bit tier comes first.
TIERS = "tiers"


def shape_of_scores(codes: Tensor, cursor: Tensor) -> tuple[int, int, int]:
    """Return B, H and C of a low-bit tier; C is the capacity of a row in tokens."""
    return cursor.shape[0], codes.shape[1], (cursor.shape[1] - CURSOR_SIZE) * PAGE


@dataclass(frozen=True)
class Pages:
    """All pairs of rows in pages, read and written by token.

    pages: [P, H, 256, 2, d].
    table: int64 [B, C/256], on the CPU.
    """

    pages: Tensor
    table: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.pages.dtype

    @property
    def device(self) -> torch.device:
        return self.pages.device

    @property
    def shape(self) -> torch.Size:
        """The shape of the contiguous rows."""
        _, heads, page, *pair = self.pages.shape
        return torch.Size((self.table.shape[0], heads, self.table.shape[1] * page, *pair))


def table_of(cursor: Tensor) -> Tensor:
    """Return a cursor's table on the CPU; blocks the host only for a device cursor whose record has no such table."""
    known = host_record(cursor).table if cursor.is_cuda else None
    if known is None or known.shape != (cursor.shape[0], cursor.shape[1] - CURSOR_SIZE):
        return cursor[:, CURSOR_SIZE:].cpu()
    return known


def pairs_of(tier: Tensor, cursor: Tensor) -> Pages:
    """Return all pairs of the cursor's rows."""
    return Pages(tier, table_of(cursor))


def rows_read(tier: Tensor, table: Tensor, first: int = 0) -> Tensor:
    """Return a copy [B, H, C, ...] of the rows with this table [B, C/256], without contents before page `first`."""
    rows, pages = table.shape
    _, heads, each, *rest = tier.shape
    copied = tier.new_empty(rows, heads, pages, each, *rest)
    copied[:, :, first:] = tier[table[:, first:]].transpose(1, 2)
    return copied.flatten(2, 3)


def write_rows(tier: Tensor, table: Tensor, rows: Tensor, cursor: Tensor) -> None:
    """Copy the pages with the tokens that a step has added to the low-bit tier from `rows` to the tier.

    cursor: that of these rows, which are equal but for their tables.
    """
    pages = rows.unflatten(2, (table.shape[1], tier.shape[2]))
    for number in range(int(cursor[0, LOW_BIT]) // PAGE, -(-int(cursor[0, NEXT_LOW_BIT]) // PAGE)):
        tier[table[:, number]] = pages[:, :, number]


def runs(pairs: Pages, start: int, stop: int) -> Iterator[tuple[Tensor, int, int]]:
    """Yield the pages [1, H, 256, 2, d] of tokens `start` to `stop` of one row, with the first token and the last one
    + 1 of each."""
    (table,) = pairs.table.tolist()
    for number in range(start // PAGE, -(-stop // PAGE)):
        page = table[number]
        yield pairs.pages[page : page + 1], max(start, number * PAGE), min(stop, (number + 1) * PAGE)


def views(page: Tensor, begin: int, end: int) -> list[Tensor]:
    """Return the parts [1, H, n, ...] of a page's tokens `begin` to `end` of a row (`stored_pairs.parts_of`)."""
    first = begin // PAGE * PAGE
    return [part[:, :, begin - first : end - first] for part in parts_of(page)]


def rows_of_pages(pairs: Pages) -> Iterator[Pages]:
    """Yield each row."""
    for row in range(pairs.table.shape[0]):
        yield Pages(pairs.pages, pairs.table[row : row + 1])


def tokens_of(pairs: Pages, start: int, stop: int) -> Tensor:
    """Return tokens `start` to `stop` [B, H, n, 2, d or w], as a view if one row has them in one page, else as a
    copy."""
    found = []
    for row in rows_of_pages(pairs):
        pieces = [views(*run) for run in runs(row, start, stop)] or [views(pairs.pages[:1], 0, 0)]
        found.append(joined(pieces[0]) if len(pieces) == 1 else torch.cat([joined(piece) for piece in pieces], 2))
    return found[0] if len(found) == 1 else torch.cat(found)


def put(pairs: Pages, start: int, new: Tensor) -> None:
    """Write the pairs `new` [B, H, n, 2, d or w] to the tokens from `start` on."""
    for row, source in zip(rows_of_pages(pairs), new.split(1), strict=True):
        for page, begin, end in runs(row, start, start + new.shape[2]):
            write(source[:, :, begin - start : end - start], views(page, begin, end))


def pairs_at(pairs: Pages, row: Tensor, head: Tensor, token: Tensor, which: int | slice = slice(None)) -> Tensor:
    """Return the pairs [..., 2, d or w] of the tokens at integer tensors' indices, on the tier's device.

    which: 0 for keys alone, 1 for values alone, [..., d].
    """
    row, head, token = (x.to(pairs.device) for x in (row, head, token))
    page = pairs.table.to(pairs.device)[row, token // PAGE]
    return joined([part[page, head, token % PAGE, which] for part in parts_of(pairs.pages)])
