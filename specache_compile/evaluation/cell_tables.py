"""Rows as a table, a CSV and a JSON file."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tabulate import tabulate

from .intervals import interval
from .result_rows import ResultRow, sources
from .settings import UNCOMPILED
from .tasks import NO_QUESTION
from .tasks.long import first_difference
from .tasks.perplexity import RECENT

# A cell is no evidence about a cache if the uncompiled model has a smaller share of right answers.
GATE = 0.8
MARK = "*"
FAILED = f"{MARK} the uncompiled model itself is right in less than {GATE:.0%}: in no mean, and evidence of nothing"
SHORT = f"{MARK} the uncompiled model is not shown to gain from more than its last {RECENT} tokens: evidence of nothing"
UNITS = ("perplexity",)  # every other metric is a share
# Of each of a row's `kinds`.
KIND_COLUMNS = ("KL", "±", "top-1")


def shown(row: ResultRow) -> str:
    return f"{row.score:.3f}" if row.metric in UNITS else f"{row.score:.1%}"


def shown_ratio(row: ResultRow) -> str:
    return "" if row.kv_ratio is None else f"{row.kv_ratio:.3f}"


def aligned(lines: Sequence[Sequence[str | None]], headers: Sequence[str]) -> str:
    """The first column to the left, figures to the right."""
    return tabulate(lines, headers, colalign=("left", *["right"] * (len(headers) - 1)), disable_numparse=True)


def kinds_table(rows: Sequence[ResultRow]) -> str:
    """The table of rows with `kinds`: a line for each method and cell.

    Each kind has its KL ± 95 % interval and top-1 agreement. The last columns are the KL's paired difference to the
    last method on forced text, and its 95 % interval.
    """
    kinds = list(rows[0].detail["kinds"])
    last = {row.cell: row for row in rows}
    lines = []
    for row in rows:
        cells = [cell for kind in kinds for cell in kind_cells(row.detail["kinds"][kind])]
        lines.append([row.method, row.cell, shown_ratio(row), *cells, *difference(row, last[row.cell])])
    names = [f"{kind}: {column}" for kind in kinds for column in KIND_COLUMNS]
    return aligned(lines, [rows[0].task, "context", "device KV", *names, "forced KL, above the last", "±"])


def kind_cells(kind: Mapping[str, Any]) -> list[str]:
    """KIND_COLUMNS."""
    return [f"{kind['kl']:.4f}", f"{interval(kind['each']):.4f}", f"{kind['agreement']:.1%}"]


def difference(row: ResultRow, other: ResultRow) -> tuple[str, str]:
    """Mean and 95 % interval of the paired differences, window by window; empty where there are no pairs."""
    if row is other or row.samples != other.samples:
        return "", ""
    mine, theirs = (r.detail["kinds"]["forced"]["each"] for r in (row, other))
    paired = [a - b for a, b in zip(mine, theirs, strict=True)]
    return f"{sum(paired) / len(paired):+.4f}", f"{interval(paired):.4f}"


def long_table(rows: Sequence[ResultRow]) -> str:
    """The table of a method's own texts: a line for each method and cell.

    Columns: KL ± 95 % interval over texts, KL of the first and the last stretch, the median position of
    the first different token, repeated phrases and length.
    """
    full = {row.cell: row for row in rows if row.method == UNCOMPILED}
    lines = []
    for row in rows:
        each, stretches = row.detail["each"], row.detail["by_position"]
        shown_kl = {place: (f"{kl:.4f}", f"{row.detail['intervals'][place]:.4f}") for place, kl in stretches.items()}
        first, last = (shown_kl[place] for place in (min(shown_kl, key=int), max(shown_kl, key=int)))
        kl = (f"{row.score:.4f}", f"{interval([one['kl'] for one in each]):.4f}")
        again, length = (statistics.fmean(one[name] for one in each) for name in ("repeated", "length"))
        others = (differs_at(row, full.get(row.cell)), f"{again:.1%}", f"{length:,.0f}")
        lines.append([row.method, row.cell, shown_ratio(row), *kl, *first, *last, *others])
    names = ("KL", "±", "first stretch", "±", "last stretch", "±", "differs at", "repeated", "length")
    return aligned(lines, [rows[0].task, "context", "device KV", *names])


def differs_at(row: ResultRow, full: ResultRow | None) -> str:
    """The median position at which a row's texts first differ from the uncompiled model's; `none` if most never do."""
    if full is None or full is row or full.samples != row.samples:
        return ""
    pairs = zip(row.detail["each"], full.detail["each"], strict=True)
    places = [first_difference(mine["tokens"], theirs["tokens"]) for mine, theirs in pairs]
    median = sorted(math.inf if place is None else place for place in places)[len(places) // 2]
    return "none" if median == math.inf else f"{median:,.0f}"


def task_table(rows: Sequence[ResultRow]) -> str:
    """One task: a line for each method, a column for each cell.

    Then come the mean where it means something, and the paired difference to the uncompiled model with its interval and
    number of pairs. The last column is the device's KV share at the longest context. Cells that the uncompiled model
    fails are marked and are in no mean. Perplexity has one more line: the uncompiled model's behind the last tokens
    alone.
    """
    cells = list(dict.fromkeys(row.cell for row in rows))
    methods = list(dict.fromkeys(row.method for row in rows))
    at = {(row.method, row.cell): row for row in rows}
    full = {cell: at[UNCOMPILED, cell] for cell in cells if (UNCOMPILED, cell) in at}
    failed = failed_cells(rows)
    lines = []
    for method in methods:
        mine = [at[method, cell] for cell in cells if (method, cell) in at]
        counted = [row for row in mine if row.cell not in failed]
        scores = [shown(at[method, cell]) if (method, cell) in at else "" for cell in cells]
        lines.append(
            [
                method, *scores, mean_of(counted) if len(cells) > 1 and rows[0].metric not in UNITS else None,
                *(above_full(counted, full) if any(map(paired_scores, full.values())) else [None] * 3),
                shown_ratio(max(mine, key=lambda row: row.context)),
            ]
        )  # fmt: skip
        recent = [recent_perplexity(full.get(cell)) for cell in cells]
        if method == UNCOMPILED and any(recent):
            lines.append([f"{UNCOMPILED}, {RECENT} tokens", *recent, *[None] * 5])
    metric = "/".join(dict.fromkeys(row.metric for row in rows))
    shown_cells = [f"{cell} {MARK}" if cell in failed else cell for cell in cells]
    unit = "nats" if metric in UNITS else "points"
    headers = [
        f"{rows[0].task}: {metric}", *shown_cells, "mean", f"above uncompiled, {unit}", "±", "pairs", "device KV",
    ]  # fmt: skip
    kept = [i for i in range(len(headers)) if i == 0 or any(line[i] is not None for line in lines)]
    found = aligned([[line[i] for i in kept] for line in lines], [headers[i] for i in kept])
    return f"{found}\n{SHORT if metric in UNITS else FAILED}" if failed else found


def failed_cells(rows: Sequence[ResultRow]) -> set[str]:
    """The cells of one task that the uncompiled model itself fails."""
    return {row.cell for row in rows if row.method == UNCOMPILED and fails(row)}


def fails(row: ResultRow) -> bool:
    """Whether the uncompiled model's row is evidence of nothing: either it finds too little, or its perplexity is not
    below the one behind the last tokens alone with 95 % confidence."""
    if "recent" in row.detail:
        gains = [near - whole for near, whole in zip(row.detail["recent"], row.detail["nats"], strict=True)]
        return not sum(gains) / len(gains) > interval(gains)
    return row.task not in NO_QUESTION and row.score < GATE


def recent_perplexity(row: ResultRow | None) -> str:
    """The uncompiled model's perplexity behind the last tokens alone; "" where it was not measured."""
    nats = [] if row is None else row.detail.get("recent", [])
    return f"{math.exp(sum(nats) / len(nats)):.3f}" if nats else ""


def paired_scores(row: ResultRow) -> list[float]:
    """Scores to pair with another method's: each answer's score, or each window's nats a token."""
    return row.detail.get("nats") or [one["score"] for one in row.detail.get("each", [])]


def above_full(rows: Sequence[ResultRow], full: Mapping[str, ResultRow]) -> tuple[str, str, str]:
    """Mean over cells and 95 % interval of the paired differences to the uncompiled model, and the number of pairs:
    answers or windows.

    In points of a hundred, or in nats a token for perplexities. Empty where a cell has no pairs.
    """
    means, squares, count = [], [], 0
    for row in rows:
        other = full.get(row.cell)
        if other is None or other is row or not paired_scores(row) or row.samples != other.samples:
            return "", "", ""
        both = zip(paired_scores(row), paired_scores(other), strict=True)
        paired = [mine - theirs for mine, theirs in both]
        means.append(sum(paired) / len(paired))
        squares.append(interval(paired) ** 2)
        count += len(paired)
    if not means:
        return "", "", ""
    mean, half = sum(means) / len(means), math.sqrt(sum(squares)) / len(means)
    if rows[0].metric in UNITS:
        return f"{mean:+.4f}", f"{half:.4f}", str(count)
    return f"{100 * mean:+.1f}", f"{100 * half:.1f}", str(count)


def mean_of(rows: Sequence[ResultRow]) -> str:
    """The plain mean over cells; the geometric one has no name a reader would expect, so perplexities have none."""
    return f"{sum(row.score for row in rows) / len(rows):.1%}" if rows else ""


def table(rows: Sequence[ResultRow]) -> str:
    """All tasks, one table under the other. device KV is that of the task's longest context."""
    tasks = dict.fromkeys(row.task for row in rows)
    by_task = ([row for row in rows if row.task == task] for task in tasks)
    return "\n\n".join(form_of(mine)(mine) for mine in by_task)


def form_of(rows: Sequence[ResultRow]) -> Callable[[Sequence[ResultRow]], str]:
    """How the rows of one task are laid out."""
    if "kinds" in rows[0].detail:
        return kinds_table
    return long_table if "intervals" in rows[0].detail else task_table


def write_csv(path: Path, rows: Sequence[ResultRow]) -> None:
    """One line a row, details left out."""
    names = [name for name in ResultRow.__dataclass_fields__ if name not in ("detail", "key")]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in rows)


def write_json(path: Path, rows: Sequence[ResultRow]) -> None:
    """Everything, a row a line; each carries the provenance of the run that measured it."""
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    path.write_text(f'{{"provenance": {json.dumps(sources(rows))},\n"rows": [\n{lines}\n]}}\n')
