"""The cursor: how far a session's cache has come, in one int64 tensor that every op is given.

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
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

CURSOR_SIZE = 4
LENGTH, LOW_BIT, NEXT_LOW_BIT, QUEUE = range(CURSOR_SIZE)

# What the host knows of the cursors on devices, by address: reading one would stop the host.
_lengths: dict[int, int] = {}


def new_cursor(device: torch.device) -> Tensor:
    """A cursor where the ops read it: beside the model on CUDA, on the host elsewhere."""
    return torch.zeros(CURSOR_SIZE, dtype=torch.int64, device=device if device.type == "cuda" else "cpu")


def publish(cursor: Tensor, length: int) -> None:
    """Note the length that a device cursor holds from the next kernel on; a fake one is at no address."""
    if isinstance(cursor, FakeTensor):
        return
    if cursor.data_ptr() not in _lengths:
        weakref.finalize(cursor, _lengths.pop, cursor.data_ptr(), None)
    _lengths[cursor.data_ptr()] = length


def length_of(cursor: Tensor) -> int:
    """The number of cached tokens; stops the host only for a cursor that nobody published."""
    known = _lengths.get(cursor.data_ptr()) if cursor.is_cuda else None
    return int(cursor[LENGTH]) if known is None else known
