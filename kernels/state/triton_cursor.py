"""Triton: the cursor's elements, for `tl.load(cursor + row * columns + AT_LENGTH)`, and lookups in the page table.

A separate module, since `cursor` is imported without triton too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specache_compile.kernels.codes.records import RECORD

from .cursor import CURSOR_SIZE, LENGTH, LOW_BIT, NEXT_LOW_BIT
from .page_table import PAGE

AT_LENGTH, AT_LOW_BIT, AT_NEXT_LOW_BIT = tl.constexpr(LENGTH), tl.constexpr(LOW_BIT), tl.constexpr(NEXT_LOW_BIT)
AT_TABLE, PAGE_TOKENS = tl.constexpr(CURSOR_SIZE), tl.constexpr(PAGE)
assert PAGE == 4 * RECORD, "`record_in_page` has this as shifts"


@triton.jit
def record_in_page(row, head, record, heads):
    """Return the index of a head's record in a tier in pages, among all heads' records, computed in 32 bits.

    row: the row of the cursor. head, record: int32.
    """
    page = tl.load(row + AT_TABLE + (record >> 2)).to(tl.int32)
    return ((page * heads + head) * 4 + (record & 3)).to(tl.int64)


@triton.jit
def place_in_page(row, head, token, heads, there):
    """Return the index of a head's token in a tier in pages, among all heads' tokens; tokens of a page are contiguous.

    row: the row of the cursor. there: mask of the lookup.
    """
    page = tl.load(row + AT_TABLE + token // PAGE_TOKENS, there, 0)
    return (page * heads + head) * PAGE_TOKENS + token % PAGE_TOKENS
