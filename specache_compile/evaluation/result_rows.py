"""Finished rows on disk: one JSON object a line, appended and flushed to the disk at once.

A row's key names everything that its figures depend on. Reading the file skips a line that an interruption cut short;
its row is measured again.
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
    samples: how many questions or tokens the figure is the mean of.
    detail: the figures behind it (by depth, by position, ...).
    kv_ratio: device KV bytes over the full cache's, of the last batch.
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
    """The finished rows of a file by key, the newest of a key; a torn last line is no row."""
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
    """The provenance of these rows, one line for each run that measured some of them."""
    return list(dict.fromkeys(row.provenance for row in rows))


def append_row(path: Path, row: ResultRow) -> None:
    """Write one line, behind a torn line a new one, and wait until it is on the disk."""
    torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("a") as file:
        file.write(("\n" if torn else "") + json.dumps(asdict(row)) + "\n")
        file.flush()
        os.fsync(file.fileno())
