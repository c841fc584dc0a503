"""Triton: the cursor's elements, for `tl.load(cursor + row * columns + AT_LENGTH)`; `cursor` says what they are. And
where a token lies that a row's table tells of (`pages.py`).

A file of its own: `cursor` is imported where there is no triton too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cursor import CURSOR_SIZE, LENGTH, LOW_BIT, NEXT_LOW_BIT
from .pages import PAGE

AT_LENGTH, AT_LOW_BIT, AT_NEXT_LOW_BIT = tl.constexpr(LENGTH), tl.constexpr(LOW_BIT), tl.constexpr(NEXT_LOW_BIT)
AT_TABLE, PAGE_TOKENS = tl.constexpr(CURSOR_SIZE), tl.constexpr(PAGE)


@triton.jit
def place_in_page(row, head, token, heads, there):
    """Where a token of a head lies in a tier in pages, of all heads' tokens. row: its row of the cursor; there: whether
    to ask. The tokens of one page lie side by side."""
    page = tl.load(row + AT_TABLE + token // PAGE_TOKENS, there, 0)
    return (page * heads + head) * PAGE_TOKENS + token % PAGE_TOKENS
