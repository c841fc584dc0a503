"""The ops of `tier_ops.py` in C++: selection, fetches, and writes of pairs."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from specache_compile.kernels.cpp.library import DTYPES, tiers_library
from specache_compile.kernels.state.by_rows import rows_of
from specache_compile.kernels.state.cursor import CURSOR_SIZE, LOW_BIT
from specache_compile.kernels.state.layout import StoredTiers
from specache_compile.kernels.state.stored_pairs import ROUNDED

from . import tier_ops as tiers

# The operands of `append`.
APPENDED = tuple(inspect.signature(tiers.append).parameters)


def rounding(pairs: Tensor, host: Tensor) -> int:
    """Return the number of the pairs' dtype among `DTYPES` if the host tier is rounded, else -1."""
    return [*DTYPES].index(pairs.dtype) if host.dtype == ROUNDED else -1


def select_topk_fused(scores: Tensor, selected: Tensor, cursor: Tensor | None = None) -> None:
    """Compute `tier_ops.select_topk` in C++; same arguments and results.

    cursor: None, or that of the rows, to select only tokens that are in the low-bit tier before the step.
    """
    scores, (rows, heads, k) = scores.contiguous(), selected.shape
    given = (None, 0) if cursor is None else (cursor.data_ptr(), cursor.shape[1])
    sizes = (rows * heads, scores.shape[-1], k, *given, heads)
    tiers_library().select_topk(scores.data_ptr(), *sizes, selected.data_ptr())


def prefetch_fused(
    selected: Tensor, cursor: Tensor, host: Tensor, slots: Tensor, slot_index: Tensor, fetched: Tensor
) -> None:
    """Run `tier_ops.prefetch` in C++; same arguments and results."""
    sizes = (cursor.shape[1], *selected.shape, pair_bytes(host), pair_bytes(slots), rounding(slots, host))
    places = [tensor.data_ptr() for tensor in (selected, cursor, host, slots, slot_index)]
    tiers_library().refill(*places, *sizes, fetched.data_ptr())


def correct_fused(
    scores: Tensor, cursor: Tensor, host: Tensor, slots: Tensor, slot_index: Tensor, corrected: Tensor, *rest: Any,
) -> Tensor:  # fmt: skip
    """Run `tier_ops.correct` in C++; same arguments and results."""
    chosen = torch.empty_like(slot_index)
    select_topk_fused(scores[0], chosen, cursor)
    prefetch_fused(chosen, cursor, host, slots, slot_index, corrected)
    return chosen


def offload_fused(k: Tensor, v: Tensor, padding: Tensor | None, cursor: Tensor, host: Tensor) -> None:
    """Run `tier_ops.offload` in C++ if k, v and an exact host tier have one dtype; same arguments and results."""
    if k.dtype != v.dtype or host.dtype not in (k.dtype, ROUNDED):
        tiers.offload(k, v, padding, cursor, host)
    else:
        write_pairs(k, v, cursor, host)


def append_fused(k: Tensor, v: Tensor, padding: Tensor | None, cursor: Tensor, *stored: Any) -> None:
    """Run `tier_ops.append`, in C++ for rows where no token leaves the window; same arguments and results."""
    recent: Tensor = stored[StoredTiers._fields.index("recent")]
    leaves = [next_low_bit > low_bit for low_bit, next_low_bit in cursor[:, LOW_BIT:CURSOR_SIZE].tolist()]
    one_token = k.shape[2] == 1  # the ring has space for it next to all tokens that leave
    if all(leaves) or (any(leaves) and not one_token) or not k.dtype == v.dtype == recent.dtype:
        tiers.append(k, v, padding, cursor, *stored)
        return
    for number in (number for number, leaving in enumerate(leaves) if leaving):
        row = slice(number, number + 1)
        given = zip(APPENDED, (k, v, padding, cursor, *stored), strict=False)
        tiers.append(*(rows_of(name, value, row) for name, value in given))
    write_pairs(k, v, cursor, recent, ring=recent.shape[2])


def write_pairs(k: Tensor, v: Tensor, cursor: Tensor, target: Tensor, ring: int = 0) -> None:
    """Write k, v [B, H, T, d] to target, from each row's length on.

    ring: token t goes to index t mod ring; 0: the target is in pages.
    """
    k, v = k.contiguous(), v.contiguous()
    stored = (pair_bytes(target), pair_bytes(k), rounding(k, target))
    places = [tensor.data_ptr() for tensor in (k, v, cursor, target)]
    tiers_library().write_pairs(*places, cursor.shape[1], *k.shape[:3], ring, *stored)


def pair_bytes(pairs: Tensor) -> int:
    """Return the bytes of a pair of keys or values [..., d or w]."""
    return 2 * pairs.shape[-1] * pairs.element_size()
