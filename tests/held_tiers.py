"""The cached tokens in a session's tiers, and the effect of an interruption."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import specache_compile as sc
from conftest import failing, greedy, step
from specache_compile.compat import cache_of, with_cache
from specache_compile.kernels.codes.records import read_levels, stored_dim
from specache_compile.kernels.state.layout import Layout
from specache_compile.kernels.state.page_table import PAGE, Pages, rows_read
from specache_compile.kernels.state.stored_pairs import joined, parts_of
from specache_compile.methods.field import LayerShape
from specache_compile.runtime.session import session_of
from specache_compile.runtime.state import empty, fields_of, paged_fields
from specache_compile.runtime.step import Step


def in_rows(session: Any) -> list[dict[str, Tensor]]:
    """Return each layer's state tensors, those in pages as copies [B, H, n, ...] of the rows' whole pages."""
    session.tiers.drain()
    table = session.tiers.table[:, : max(map(len, session.tiers.pages))]

    def rows(pages: Tensor) -> Tensor:
        return joined([rows_read(part, table) for part in parts_of(pages)])

    return [
        {name: rows(x) if name in names else x for name, x in state.items()}
        for layer, state in zip(session.layers, session.state, strict=True)
        for names in [{field.name for field in paged_fields(session.options, layer)}]
    ]


def adjacent(rows: int, capacity: int) -> Tensor:
    """Return the table of rows of so many tokens whose pages are adjacent."""
    return torch.arange(rows * capacity // PAGE).view(rows, -1)


def empty_state(options: Any, layer: LayerShape, batch: int, capacity: int) -> dict[str, Tensor]:
    """Return a layer's empty state tensors, with `adjacent` pages."""
    sizes = {True: (batch * capacity // PAGE, PAGE), False: (batch, capacity)}
    return {field.name: empty(field, options, layer, *sizes[field.by_page]) for field in fields_of(options, layer)}


def in_pages(rows: Tensor, table: Tensor | None = None) -> Pages:
    """Return rows [B, H, C, ...] in the pages of a table, by default `adjacent` ones; other pages are undefined."""
    table = adjacent(len(rows), rows.shape[2]) if table is None else table
    parts = rows.unflatten(2, (table.shape[1], -1)).transpose(1, 2).flatten(0, 1)
    pages = torch.full((int(table.max()) + 1, *parts.shape[1:]), 3, dtype=rows.dtype)
    pages[table.flatten()] = parts
    return Pages(pages, table)


def untouched(tensor: Tensor) -> bool:
    """Return whether all bytes are still the 0x7F that a test has filled in."""
    return bool((tensor.contiguous().view(torch.uint8) == 0x7F).all())


def cursor_over(table: Tensor, length: int = 0, low_bit: int = 0, next_low_bit: int = 0) -> Tensor:
    """Return a cursor with these numbers for each row of a page table."""
    return torch.cat([torch.tensor([[length, low_bit, next_low_bit]]).repeat(len(table), 1), table], 1)


def low_bit_levels(layout: Layout, state: Any, head_dim: int, low_bit: int) -> dict[str, Tensor]:
    """Return the levels of the low-bit tier's tokens; the record of the last ones may hold others."""
    if not layout.is_quantised:
        return {"codes": state["codes"][:, :, :low_bit]}
    dim, parts = stored_dim(head_dim), enumerate(layout[:2])
    return {f"levels {n}": read_levels(state["codes"], dim, bits, bool(n))[:, :, :low_bit] for n, bits in parts}


def held(session: Any) -> list[dict[str, Tensor]]:
    """Return each layer's host, low-bit and recent tier, and the slots' pairs with their host pairs."""
    length, low_bit = session.length, session.options.low_bit_length(session.length)
    layers = []
    for state in in_rows(session):
        recent = torch.arange(low_bit, length) % state["recent"].shape[2]
        index = state["slot_index"].long()
        there = (index >= 0)[:, :, :, None, None]
        host = state["host"]
        pairs = host.gather(2, index.clamp(min=0)[:, :, :, None, None].expand_as(state["slots"]))
        assert (index < low_bit).all()
        assert torch.equal(state["slots"].where(there, 0), pairs.where(there, 0))
        sinks = state["sink_index"].long()
        kept = ((sinks >= 0) & (sinks < low_bit))[..., None, None]
        layers.append(
            {
                "host": host[:, :, :length], **low_bit_levels(session.options.layout, state, host.shape[-1], low_bit),
                "keys": state["key_params"][:, :, : low_bit // session.options.group_size],
                "values": state["value_params"][:, :, :low_bit], "recent": state["recent"][:, :, recent],
                "sinks": state["sink_pairs"].where(kept, 0),
            }
        )  # fmt: skip
    return [{name: tensor.clone() for name, tensor in layer.items()} for layer in layers]


def at_hand(cache: DynamicCache) -> Any:
    """Return a cache's session, cropped to the cache's tokens."""
    session: Any = session_of(cache)
    keys: Any = cache.layers[0].keys
    session.replay(keys.handle.version, keys.handle.edits)
    return session


def differences(some: Any, others: Any) -> list[tuple[int, str]]:
    """Return layers and tiers that differ in any bit."""
    pairs = enumerate(zip(some, others, strict=True))
    return [(layer, name) for layer, (a, b) in pairs for name in a if not torch.equal(a[name], b[name])]


def interrupted_behind(steps: Sequence[int], twin: Any, plain: Any, ids: Tensor, tokens: int) -> None:
    """Require that a generation interrupted after such a step leaves exact pairs of its tokens, and continues to the
    uncompiled model's tokens."""
    expected = greedy(plain, ids, tokens)
    for number in steps:
        cache, interrupted = DynamicCache(), failing(Step.run_graph, KeyboardInterrupt, number + 1, after=True)
        with patch.object(Step, "run_graph", interrupted), pytest.raises(KeyboardInterrupt):
            greedy(twin, ids, tokens, **with_cache(cache))
        length = cache.get_seq_length()
        assert length >= ids.shape[1]
        exact = cache_of(step(plain, expected[:, :length]))
        for ours, theirs in zip(sc.materialize(cache).layers, exact.layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(ours.values, theirs.values, atol=1e-3, rtol=1e-3)
        rest = greedy(twin, expected[:, : length + 1], ids.shape[1] + tokens - 1 - length, **with_cache(cache))
        assert torch.equal(rest, expected)


class Interrupt(KeyboardInterrupt):
    """An interrupt that no user sends."""


class AfterLines:
    """Raises after so many executed lines of steps, sessions, pools and batches, once. None: it counts them.

    Tests thus interrupt at any moment without a signal.
    """

    OURS = tuple(f"specache_compile/{folder}/" for folder in ("batching", "caches", "paging", "runtime"))

    def __init__(self, moment: int | None, error: type[BaseException] = Interrupt) -> None:
        self.moment, self.error, self.lines, self.last = moment, error, 0, ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self.line if is_ours(frame.f_code.co_filename) else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        # The last lines of `Batch.step` return the tokens: Python calls no handler of a signal between them.
        if event == "line" and not (frame.f_code.co_name == "step" and "batching" in frame.f_code.co_filename):
            self.lines += 1
            if self.lines == self.moment:
                self.last = f"{frame.f_code.co_name} {frame.f_lineno}"
                raise self.error
        return self.line

    def __enter__(self) -> AfterLines:
        sys.settrace(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)


@functools.cache
def is_ours(file: str) -> bool:
    return any(part in file for part in AfterLines.OURS)
