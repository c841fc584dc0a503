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

from dataclasses import dataclass

import torch
from torch import Tensor

from specache_compile.kernels.codes.records import RECORD

from .cursor import CURSOR_SIZE, LOW_BIT, NEXT_LOW_BIT, host_record

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
    """All pairs of rows in pages, which `by_token` reads and writes.

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
    for row, numbers in enumerate(table.tolist()):
        for number in range(first, pages):
            copied[row, :, number] = tier[numbers[number]]
    return copied.flatten(2, 3)


def write_rows(tier: Tensor, table: Tensor, rows: Tensor, cursor: Tensor) -> None:
    """Copy the records with the tokens that a step has added to the low-bit tier from `rows` to their pages.

    cursor: that of these rows, which are equal but for their tables.
    """
    start, stop = int(cursor[0, LOW_BIT]) // RECORD * RECORD, -(-int(cursor[0, NEXT_LOW_BIT]) // RECORD) * RECORD
    tokens = PAGE // tier.shape[2] if tier.shape[2] else 1  # per element of dimension 2
    for number in range(start // PAGE, -(-stop // PAGE)):
        begin, end = (max(0, min(PAGE, at - number * PAGE)) // tokens for at in (start, stop))
        places = rows[:, :, number * PAGE // tokens :]
        tier[table[:, number], :, begin:end] = places[:, :, begin:end]
