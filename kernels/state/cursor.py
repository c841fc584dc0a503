"""The cursor, int64 [rows, 3 ...]: the lengths of each row of a session's cache, an operand of every op.

The session writes the cursor before a step, and nothing changes it during the step. A captured step therefore reads
its lengths at a fixed address. The comment below has the layout.
"""

#   element   name           unit      value while a step of T new tokens runs
#   0         LENGTH         tokens    cached before the step; new tokens have the indices LENGTH to LENGTH + T - 1
#   1         LOW_BIT        tokens    in the low-bit tier before the step, whole groups
#   2         NEXT_LOW_BIT   tokens    in the low-bit tier after the step, whole groups
#
#   token     0           LOW_BIT          NEXT_LOW_BIT          LENGTH         LENGTH + T
#             │  low-bit     │  leaves the      │  stays in the      │  new tokens,  │
#             │  tier        │  window now      │  window            │  offloaded    │
#
# A long prompt moves NEXT_LOW_BIT past LENGTH: some new tokens then leave the window at once. Rows of a left-padded
# prompt start with p padding tokens. LENGTH is then -p; no op stores tokens with negative indices. A row's page table
# follows its three numbers (`page_table.py`).

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

T = TypeVar("T")

CURSOR_SIZE = 3
LENGTH, LOW_BIT, NEXT_LOW_BIT = range(CURSOR_SIZE)


@dataclass(eq=False)
class HostRecord:
    """The host's record of one session on a CUDA device, which ops find by the session's cursor (`host_record`).

    lengths: each row's LENGTH in a device cursor from the next kernel on, since reading it would block the host.
    table: the page tables in that cursor. None: unknown, as for lengths.
    fetches: address of a layer's slots → the event after its last fetch.
    """

    lengths: tuple[int, ...] | None = None
    table: Tensor | None = None
    fetches: dict[int, Any] = field(default_factory=dict)


# Records by the address of a cursor.
_records: weakref.WeakValueDictionary[int, HostRecord] = weakref.WeakValueDictionary()


def attach(cursor: Tensor, record: HostRecord) -> None:
    """Let ops find a record by the address of this cursor, which keeps the record alive; a fake cursor has none."""
    if not isinstance(cursor, FakeTensor):
        _records[cursor.data_ptr()] = record
        weakref.finalize(cursor, detach, cursor.data_ptr(), record)


def detach(address: int, record: HostRecord) -> None:
    if _records.get(address) is record:
        del _records[address]


def host_record(cursor: Tensor) -> HostRecord:
    """Return the record of a cursor's session; a cursor without a session gets its own."""
    if cursor.data_ptr() not in _records:
        attach(cursor, HostRecord())
    return _records[cursor.data_ptr()]


def new_cursor(device: torch.device, rows: int, pages: int = 0) -> Tensor:
    """Return a new cursor on the CUDA device, else on the host. pages: number of pages in a row's table."""
    return torch.zeros(rows, CURSOR_SIZE + pages, dtype=torch.int64, device=device if device.type == "cuda" else "cpu")


def lengths_of(cursor: Tensor) -> tuple[int, ...]:
    """Return each row's LENGTH; blocks the host only for a device cursor whose record has no lengths."""
    known = host_record(cursor).lengths if cursor.is_cuda else None
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
