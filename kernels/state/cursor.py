"""The cursor int64 [rows, 4 ...]: how far each row of a session's cache has come, in one tensor that every op is given.

    element   name           unit      what it says while a step of T new tokens runs
    0         LENGTH         tokens    cached before the step; the new ones are number LENGTH to LENGTH + T - 1
    1         LOW_BIT        tokens    of those in the low-bit tier before the step, whole groups
    2         NEXT_LOW_BIT   tokens    in the low-bit tier after the step, whole groups
    3         QUEUE          number    of the session's copy queue (`copy_queue`); 0: there is none

    token     0           LOW_BIT          NEXT_LOW_BIT          LENGTH         LENGTH + T
              │  low-bit     │  leaves the      │  stays in the      │  new ones,    │
              │  tier        │  window now      │  window            │  offloaded    │

A long prompt moves NEXT_LOW_BIT beyond LENGTH: then new ones leave the window at once. The session writes the cursor
before a step and nothing changes it within one, so that a captured step finds its lengths where they always are.

Rows of a left-padded prompt have tokens of their own number, and as many new ones as the longest: the first p of those
are no tokens. LENGTH is then -p, so that the new ones are number LENGTH to LENGTH + T - 1 as ever; what has a number
below 0 is not there, and no op stores it.

Where tiers are in pages, each row's table of them follows its four numbers (`pages.py`).
"""

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

# What the host knows of the cursors on devices, by address: reading one would stop the host.
_lengths: dict[int, tuple[int, ...]] = {}


def new_cursor(device: torch.device, rows: int, pages: int = 0) -> Tensor:
    """A cursor where the ops read it: beside the model on CUDA, on the host elsewhere. pages: of a row's table."""
    return torch.zeros(rows, CURSOR_SIZE + pages, dtype=torch.int64, device=device if device.type == "cuda" else "cpu")


def publish(cursor: Tensor, lengths: Sequence[int]) -> None:
    """Note each row's LENGTH that a device cursor holds from the next kernel on; a fake one is at no address."""
    if isinstance(cursor, FakeTensor):
        return
    if cursor.data_ptr() not in _lengths:
        weakref.finalize(cursor, _lengths.pop, cursor.data_ptr(), None)
    _lengths[cursor.data_ptr()] = tuple(lengths)


def lengths_of(cursor: Tensor) -> tuple[int, ...]:
    """Each row's LENGTH; stops the host only for a cursor that nobody published."""
    known = _lengths.get(cursor.data_ptr()) if cursor.is_cuda else None
    return tuple(cursor[:, LENGTH].tolist()) if known is None else known


def length_of(cursor: Tensor) -> int:
    """The LENGTH of rows that are alike, as an op's definition is called with (`by_rows`)."""
    return int(cursor[0, LENGTH])


def runs_of(rows: Sequence[T]) -> list[tuple[slice, T]]:
    """Neighbours that are equal, each run with what it has in common."""
    found, start = [], 0
    for value, run in itertools.groupby(rows):
        stop = start + len(list(run))
        found.append((slice(start, stop), value))
        start = stop
    return found
