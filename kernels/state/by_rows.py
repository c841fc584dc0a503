"""Ops' definitions assume rows of equal lengths; `by_rows` runs them for any rows."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .cursor import CURSOR_SIZE, LOW_BIT, runs_of
from .layout import StoredTiers
from .page_table import LOW_BIT_TIER, PAGE, TIERS, Pages, rows_read, table_of, write_rows

# Operands that have no batch.
WITHOUT_ROWS = frozenset(("sinks", "frequencies", "weight"))


def by_rows(*returns: int, by_token: Sequence[str] = ("host",)) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a definition, to call it once per run of adjacent rows with equal lengths.

    Each call gets views of its rows of every operand, which it may write. The low-bit tier's pages are copied for the
    call, and written parts are copied back.

    returns: the batch dimension of each result.
    by_token: operands that the definition accesses by token (`page_table.py`), as `Pages`.
    """

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(run).parameters)

        @functools.wraps(run)
        def call(*arguments: Any) -> Any:
            given = dict(zip(names, arguments, strict=False))
            cursor, table = given["cursor"], table_of(given["cursor"])
            runs = runs_of(cursor[:, :CURSOR_SIZE].tolist()) if cursor.shape[0] > 1 else [(slice(0, 1), None)]
            parts = []
            for rows, _ in runs:
                own = given if len(runs) == 1 else {n: rows_of(n, x, rows, by_token) for n, x in given.items()}
                parts.append(run_alike(run, by_token, own, table[rows]))
            if not returns:
                return None
            if len(returns) == 1:
                return parts[0] if len(parts) == 1 else torch.cat(parts, returns[0])
            return tuple(torch.cat(part, dim) for part, dim in zip(zip(*parts, strict=True), returns, strict=True))

        return call

    return decorate


def run_alike(run: Callable[..., Any], by_token: Sequence[str], given: dict[str, Any], table: Tensor) -> Any:
    """Run a definition for rows of equal lengths with this page table."""
    cursor = given["cursor"][:, :CURSOR_SIZE]
    given = {**given, "cursor": cursor, **{name: Pages(given[name], table) for name in by_token if name in given}}
    if TIERS in given:
        tiers = StoredTiers(*given[TIERS])
        low_bit = {name: rows_read(getattr(tiers, name), table) for name in LOW_BIT_TIER}
        given[TIERS] = tiers._replace(**low_bit)
    written = {name: given[name] for name in LOW_BIT_TIER if name in given}
    first = int(cursor[0, LOW_BIT]) // PAGE if written else 0
    given |= {name: rows_read(tier, table, first) for name, tier in written.items()}
    results = run(*given.values())
    for name, tier in written.items():
        write_rows(tier, table, given[name], cursor)
    return results


def rows_of(name: str, value: Any, rows: slice, by_token: Sequence[str] = ()) -> Any:
    """Return these batch rows of one operand; those in pages have no rows and are unchanged."""
    if isinstance(value, Sequence) and value and isinstance(value[0], Tensor):
        named = zip(StoredTiers._fields, value, strict=True)
        return StoredTiers(*(tensor if part in LOW_BIT_TIER else tensor[rows] for part, tensor in named))
    if name in LOW_BIT_TIER or name in by_token or name in WITHOUT_ROWS or not isinstance(value, Tensor):
        return value
    if name in ("mask", "padding") and value.shape[0] == 1:
        return value
    return value[rows]
