"""Finished rows on disk: one JSON object per line, appended and flushed at once.

A row's key names all inputs of its figures. A line that an interruption cut short is skipped, and its row is measured
again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class ResultRow:
    """One setting on one cell of a task.

    score, metric: the cell's figure.
    samples: the number of questions or tokens in the mean.
    detail: further figures (by depth, by position, ...).
    kv_ratio: device KV bytes over the full cache's in the last batch.
    """

    key: str
    task: str
    method: str
    cell: str
    context: int
    score: float
    metric: str
    samples: int
    seed: int
    kv_ratio: float | None
    seconds: float
    detail: dict[str, Any] = field(default_factory=dict)
    provenance: str = ""


def read_rows(path: Path) -> dict[str, ResultRow]:
    """The finished rows of a file by key; the newest row of a key counts, an incomplete last line does not."""
    if not path.exists():
        return {}
    rows = {}
    for line in path.read_text().splitlines():
        try:
            row = ResultRow(**json.loads(line))
        except (json.JSONDecodeError, TypeError):
            continue
        rows[row.key] = row
    return rows


def sources(rows: Iterable[ResultRow]) -> list[str]:
    """The provenance of these rows, one line for each run."""
    return list(dict.fromkeys(row.provenance for row in rows))


def append_row(path: Path, row: ResultRow) -> None:
    """Append one line and flush it to the disk; an incomplete last line is ended first."""
    torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("a") as file:
        file.write(("\n" if torn else "") + json.dumps(asdict(row)) + "\n")
        file.flush()
        os.fsync(file.fileno())
