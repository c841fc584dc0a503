"""The cursor, int64 [rows, 4 ...]: the lengths of each row of a session's cache, an operand of every op.

The session writes the cursor before a step, and nothing changes it during the step. A captured step therefore reads
its lengths at a fixed address. The comment below has the layout.
"""

#   element   name           unit      value while a step of T new tokens runs
#   0         LENGTH         tokens    cached before the step; new tokens have the indices LENGTH to LENGTH + T - 1
#   1         LOW_BIT        tokens    in the low-bit tier before the step, whole groups
#   2         NEXT_LOW_BIT   tokens    in the low-bit tier after the step, whole groups
#   3         QUEUE          number    of the session's copy queue (`copy_queue`); 0: none
#
#   token     0           LOW_BIT          NEXT_LOW_BIT          LENGTH         LENGTH + T
#             │  low-bit     │  leaves the      │  stays in the      │  new tokens,  │
#             │  tier        │  window now      │  window            │  offloaded    │
#
# A long prompt moves NEXT_LOW_BIT past LENGTH: some new tokens then leave the window at once. Rows of a left-padded
# prompt start with p padding tokens. LENGTH is then -p; no op stores tokens with negative indices. If tiers are in
# pages, each row's page table follows its four numbers (`page_table.py`).

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

T = TypeVar("T")

CURSOR_SIZE = 4
LENGTH, LOW_BIT, NEXT_LOW_BIT, QUEUE = range(CURSOR_SIZE)

# Lengths of device cursors by address, since reading a cursor would block the host.
_lengths: dict[int, tuple[int, ...]] = {}


def new_cursor(device: torch.device, rows: int, pages: int = 0) -> Tensor:
    """Return a new cursor on the CUDA device, else on the host. pages: number of pages in a row's table."""
    return torch.zeros(rows, CURSOR_SIZE + pages, dtype=torch.int64, device=device if device.type == "cuda" else "cpu")


def publish(cursor: Tensor, lengths: Sequence[int]) -> None:
    """Record each row's LENGTH that a device cursor holds from the next kernel on; a fake cursor has no address."""
    if isinstance(cursor, FakeTensor):
        return
    if cursor.data_ptr() not in _lengths:
        weakref.finalize(cursor, _lengths.pop, cursor.data_ptr(), None)
    _lengths[cursor.data_ptr()] = tuple(lengths)


def lengths_of(cursor: Tensor) -> tuple[int, ...]:
    """Return each row's LENGTH; blocks the host only for a cursor that was not published."""
    known = _lengths.get(cursor.data_ptr()) if cursor.is_cuda else None
    return tuple(cursor[:, LENGTH].tolist()) if known is None else known


def length_of(cursor: Tensor) -> int:
    """Return the common LENGTH of the rows, which `by_rows` ensures."""
    return int(cursor[0, LENGTH])


def runs_of(rows: Sequence[T]) -> list[tuple[slice, T]]:
    """Return the runs of equal adjacent rows, each with its common value."""
    found, start = [], 0
    for value, run in itertools.groupby(rows):
        stop = start + len(list(run))
        found.append((slice(start, stop), value))
        start = stop
    return found
