"""Pages: 256 tokens of all heads, which rows name by number, so that what is stored once may be several rows'.

A tier in pages is a tier of P rows with 256 tokens each. Token t of a row is token t mod 256 of page `table[t // 256]`,
of a table that stands behind the row's lengths in the cursor, int64 [rows, 4 + C/256]. A cursor of four columns has no
table: token t of row b is token t of the tier's row b.

    codes       [P, H, 256, w]          key_params   [P, H, 256/g, 2, d]       value_params   [P, H, 256, 2, d/gv]
    host        [1, P, H, 256, 2, d]    full_cache   [P, H, 256, 2, d]

All other state tensors have rows as ever. Page 0 is nobody's: what has no token yet is there, and
rows that are dead write there (`lowering/row_buckets.py`).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cursor import CURSOR_SIZE, LOW_BIT, NEXT_LOW_BIT

# Tokens of a page, and of a segment of the host tier: what every capacity is a multiple of.
PAGE = 256
# Operands of the ops that may be in pages. The first are read as rows are; the last, token by token.
LOW_BIT_TIER = ("codes", "key_params", "value_params")
WHOLE = "host"
# The operand of attention that is a list of state tensors; the low-bit tier comes first.
TIERS = "tiers"

# What the host knows of the tables on devices, by their cursor's address (`cursor.publish`).
_tables: dict[int, Tensor] = {}


def has_table(cursor: Tensor) -> bool:
    return cursor.shape[1] > CURSOR_SIZE


def shape_of_scores(codes: Tensor, cursor: Tensor) -> tuple[int, int, int]:
    """B, H and C, the tokens that a row has a place for, of a low-bit tier."""
    if not has_table(cursor):
        return codes.shape[0], codes.shape[1], codes.shape[2]
    return cursor.shape[0], codes.shape[1], (cursor.shape[1] - CURSOR_SIZE) * PAGE


@dataclass(frozen=True)
class Pages:
    """All pairs of rows whose pages lie apart: what `segments` reads and writes in place of a tensor.

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

    def is_pinned(self) -> bool:
        return self.pages.is_pinned()

    @property
    def shape(self) -> torch.Size:
        """As the rows would have in one piece."""
        _, heads, page, *pair = self.pages.shape
        return torch.Size((self.table.shape[0], heads, self.table.shape[1] * page, *pair))


def publish_table(cursor: Tensor, table: Tensor) -> None:
    """Note the table that a device cursor holds from the next kernel on."""
    if cursor.is_cuda:
        if cursor.data_ptr() not in _tables:
            weakref.finalize(cursor, _tables.pop, cursor.data_ptr(), None)
        _tables[cursor.data_ptr()] = table


def table_of(cursor: Tensor) -> Tensor:
    """A cursor's table, on the CPU; stops the host only for a cursor on a device whose table nobody published."""
    known = _tables.get(cursor.data_ptr()) if cursor.is_cuda else None
    if known is None or known.shape != (cursor.shape[0], cursor.shape[1] - CURSOR_SIZE):
        return cursor[:, CURSOR_SIZE:].cpu()
    return known


def pairs_of(tier: Tensor, cursor: Tensor) -> Any:
    """All pairs of the cursor's rows: the tier itself, or its `Pages`."""
    return pairs_by(tier, table_of(cursor)) if has_table(cursor) else tier


def pairs_by(tier: Tensor, table: Tensor) -> Pages:
    """All pairs of rows with this table, of a tier in pages."""
    return Pages(tier[0] if tier.dim() == 6 else tier, table)


def row_read(tier: Tensor, table: Tensor) -> Tensor:
    """A copy [1, H, C, ...] of the row with this table [C/256]."""
    return torch.cat([tier[page] for page in table.tolist()], 1).unsqueeze(0)


def row_to_write(tier: Tensor, table: Tensor) -> Tensor:
    """A row [1, H, C, ...] with nothing in it yet, of which `write_row` takes what was put there."""
    _, heads, places, *rest = tier.shape
    return tier.new_empty((1, heads, places * table.shape[0], *rest))


def write_row(tier: Tensor, table: Tensor, row: Tensor, cursor: Tensor) -> None:
    """Copy what a step has put into the low-bit tier out of `row` into its pages. cursor: [1, 4]."""
    start, stop = int(cursor[0, LOW_BIT]), int(cursor[0, NEXT_LOW_BIT])
    tokens = PAGE // tier.shape[2] if tier.shape[2] else 1  # of a place
    for number in range(start // PAGE, -(-stop // PAGE)):
        first = number * PAGE
        begin, end = (max(0, min(PAGE, at - first)) // tokens for at in (start, stop))
        places = row[0, :, first // tokens :]
        tier[int(table[number]), :, begin:end] = places[:, begin:end]
