"""Ops' definitions assume rows of equal lengths; `by_rows` runs them for any rows."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .cursor import CURSOR_SIZE, runs_of
from .page_table import LOW_BIT_TIER, TIERS, WHOLE, has_table, pairs_of, row_read, write_row
from .segments import of_rows
from .stored_tiers import StoredTiers

F = TypeVar("F", bound=Callable[..., Any])

# Operands that have no batch.
WITHOUT_ROWS = frozenset(("sinks", "fetched", "corrected", "tally", "frequencies", "weight"))


def by_rows(*returns: int) -> Callable[[F], F]:
    """Decorate a definition, to call it once per run of adjacent rows with equal cursors; with pages, once per row.

    Each call gets views of its rows of every operand, which it may write. A low-bit tier in pages is copied for the
    call, and written parts are copied back.

    returns: the batch dimension of each result.
    """

    def decorate(run: F) -> F:
        names = list(inspect.signature(run).parameters)
        place = names.index("cursor")

        @functools.wraps(run)
        def call(*arguments: Any) -> Any:
            cursor = arguments[place]
            if has_table(cursor):
                parts = [of_pages(run, names, arguments, cursor, row) for row in range(cursor.shape[0])]
            elif cursor.shape[0] == 1 or bool((cursor == cursor[:1]).all()):
                return run(*arguments)
            else:
                parts = [
                    run(*map(functools.partial(rows_of, rows=rows), names, arguments))
                    for rows, _ in runs_of(cursor.tolist())
                ]
            if not returns:
                return None
            if len(returns) == 1:
                return torch.cat(parts, returns[0])
            return tuple(torch.cat(part, dim) for part, dim in zip(zip(*parts, strict=True), returns, strict=True))

        return call  # type: ignore[return-value]

    return decorate


def of_pages(run: Callable[..., Any], names: Sequence[str], arguments: Sequence[Any], cursor: Tensor, row: int) -> Any:
    """Run a definition for one row with tiers in pages."""
    rows, table = slice(row, row + 1), cursor[row, CURSOR_SIZE:].cpu()
    given = {name: rows_of(name, value, rows, paged=True) for name, value in zip(names, arguments, strict=False)}
    given["cursor"] = cursor[rows, :CURSOR_SIZE]
    if WHOLE in given:
        given[WHOLE] = pairs_of(given[WHOLE], cursor[rows])
    if TIERS in given:
        tiers = given[TIERS]
        given[TIERS] = tiers._replace(**{name: row_read(getattr(tiers, name), table) for name in LOW_BIT_TIER})
    written = {name: given[name] for name in LOW_BIT_TIER if name in given}
    given |= {name: row_read(tier, table) for name, tier in written.items()}
    results = run(**given)
    for name, tier in written.items():
        write_row(tier, table, given[name], given["cursor"])
    return results


def rows_of(name: str, value: Any, rows: slice, paged: bool = False) -> Any:
    """Return these batch rows of one operand; with `paged`, tiers have no rows and are unchanged."""
    if isinstance(value, Sequence) and value and isinstance(value[0], Tensor):
        whole = LOW_BIT_TIER if paged else ()
        named = zip(StoredTiers._fields, value, strict=True)
        return StoredTiers(*(tensor if part in whole else tensor[rows] for part, tensor in named))
    if paged and name in (*LOW_BIT_TIER, WHOLE):
        return value
    if not isinstance(value, Tensor) or name in WITHOUT_ROWS or (name in ("mask", "padding") and value.shape[0] == 1):
        return value
    if name == "host":
        return of_rows(value, rows)
    return value[:, rows] if name == "scores" else value[rows]  # scores are [lanes, B, ...]
