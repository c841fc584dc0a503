"""Triton: the cursor's elements, for `tl.load(cursor + row * CURSOR_ROW + AT_LENGTH)`; `cursor` says what they are.

A file of its own: `cursor` is imported where there is no triton too.
"""

from __future__ import annotations

import triton.language as tl

from .cursor import CURSOR_SIZE, LENGTH, LOW_BIT, NEXT_LOW_BIT

AT_LENGTH, AT_LOW_BIT, AT_NEXT_LOW_BIT = tl.constexpr(LENGTH), tl.constexpr(LOW_BIT), tl.constexpr(NEXT_LOW_BIT)
CURSOR_ROW = tl.constexpr(CURSOR_SIZE)
