"""The demo's rows as a table of answers, and as a summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

# By the name in `specache bench`.
METHODS = {
    "uncompiled": "full cache, uncompiled",
    "kivi:bits=2": "KIVI, 2 bits",
    "specache:setting=paper": "SpeCache as in its paper, 2 bits",
    "specache": "specache, 1.5 bits (the default)",
}

Rows = Sequence[dict[str, Any]]
ANSWER = 24


def answers_table(rows: Rows) -> str:
    """A line for each method, a column for each key."""
    keys = rows[0]["keys"]
    hidden = ("the hidden key", *(key["key"] for key in keys))
    answers = [(METHODS[row["method"]], *(first_line(key["answer"]) for key in row["keys"])) for row in rows]
    names = ("answers", *(f"key at {key['depth']:.0%}" for key in keys))
    return tabulate([hidden, *answers], names, disable_numparse=True) + "\n"


def first_line(answer: str) -> str:
    line = next(iter(answer.splitlines()), "")
    return line if len(line) <= ANSWER else f"{line[: ANSWER - 1]}…"


def summary_table(rows: Rows) -> str:
    """Keys found, bytes and time of each method, as text."""
    headers = ("cache", "keys found", "KV bytes on the device, of the full 16-bit cache's",
               f"ms per decode step at {rows[0]['context']:,} tokens", "step time, of the full cache's")  # fmt: skip
    full = rows[0]["step_ms"]
    lines = [
        (
            METHODS[row["method"]],
            f"{sum(key['found'] for key in row['keys'])} of {len(row['keys'])}",
            f"{row['of_16_bits']:.3f}", f"{row['step_ms']:.0f}", f"{row['step_ms'] / full:.2f}",
        )
        for row in rows
    ]  # fmt: skip
    return tabulate(lines, headers, colalign=("left", *["right"] * 4), disable_numparse=True)
