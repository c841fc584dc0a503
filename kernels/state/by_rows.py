"""An op's definition is written for rows that are alike, as those of one prompt are; `by_rows` runs it for any rows."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .cursor import runs_of
from .segments import of_rows
from .stored_tiers import StoredTiers

F = TypeVar("F", bound=Callable[..., Any])

# Operands that have no batch.
WITHOUT_ROWS = frozenset(("sinks", "fetched", "corrected", "tally", "frequencies", "weight"))


def by_rows(*returns: int) -> Callable[[F], F]:
    """A definition that is called once for each run of neighbours whose rows of the cursor are equal.

    returns: the batch's dimension in each result. Each call gets its rows of every operand, as views that it may write.
    """

    def decorate(run: F) -> F:
        names = list(inspect.signature(run).parameters)
        place = names.index("cursor")

        @functools.wraps(run)
        def call(*arguments: Any) -> Any:
            cursor = arguments[place]
            if cursor.shape[0] == 1 or bool((cursor == cursor[:1]).all()):
                return run(*arguments)
            parts = []
            for rows, _ in runs_of(cursor.tolist()):
                parts.append(run(*map(functools.partial(rows_of, rows=rows), names, arguments)))
            if not returns:
                return None
            if len(returns) == 1:
                return torch.cat(parts, returns[0])
            return tuple(torch.cat(part, dim) for part, dim in zip(zip(*parts, strict=True), returns, strict=True))

        return call  # type: ignore[return-value]

    return decorate


def rows_of(name: str, value: Any, rows: slice) -> Any:
    """Those batch rows of one operand."""
    if isinstance(value, Sequence) and value and isinstance(value[0], Tensor):
        return StoredTiers(*(tensor[rows] for tensor in value))
    if not isinstance(value, Tensor) or name in WITHOUT_ROWS or (name in ("mask", "padding") and value.shape[0] == 1):
        return value
    if name == "host":
        return of_rows(value, rows)
    return value[:, rows] if name == "scores" else value[rows]  # those come by lanes
