"""Rows as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from tabulate import tabulate

from .intervals import interval
from .result_rows import ResultRow
from .settings import UNCOMPILED
from .tasks import NO_QUESTION

# A cell is no evidence about a cache if the uncompiled model has a smaller share of right answers.
GATE = 0.8
MARK = "*"
FAILED = f"{MARK} evidence of nothing: the uncompiled model itself is right in less than {GATE:.0%}"


def table(rows: Sequence[ResultRow]) -> str:
    """All tasks, one table under the other."""
    tasks = dict.fromkeys(row.task for row in rows)
    return "\n\n".join(task_table([row for row in rows if row.task == task]) for task in tasks)


def task_table(rows: Sequence[ResultRow]) -> str:
    """One task: a line for each method and cell.

    Its columns are the row's figures, the paired difference to a reference with its 95 % interval and number of pairs,
    and the device's share of the full cache's bytes. The reference is the uncompiled model. For distances from it, the
    reference is the last method.
    """
    reference = rows[-1].method if is_distance(rows[0]) else UNCOMPILED
    others, failed = {row.cell: row for row in rows if row.method == reference}, failed_cells(rows)
    lines = [
        (
            row.method, f"{row.cell} {MARK}" if row.cell in failed else row.cell, *(cell for _, cell in figures(row)),
            *difference(row, others), "" if row.kv_ratio is None else f"{row.kv_ratio:.3f}",
        )
        for row in rows
    ]  # fmt: skip
    unit = "points" if is_share(rows[0]) else "nats"
    headers = [
        rows[0].task, "context", *(name for name, _ in figures(rows[0])), f"above {reference}, {unit}", "±", "pairs",
        "device KV",
    ]  # fmt: skip
    kept = [column for column in range(len(headers)) if any(line[column] for line in lines)]
    found = tabulate(
        [[line[column] for column in kept] for line in lines], [headers[column] for column in kept],
        colalign=("left", *["right"] * (len(kept) - 1)), disable_numparse=True,
    )  # fmt: skip
    return f"{found}\n{FAILED}" if failed else found


def is_distance(row: ResultRow) -> bool:
    """Whether the row measures the distance from the full cache."""
    return "kinds" in row.detail or "intervals" in row.detail


def is_share(row: ResultRow) -> bool:
    """Whether the row's score is a share of right answers."""
    return row.metric != "perplexity" and not is_distance(row)


def figures(row: ResultRow) -> list[tuple[str, str]]:
    """The row's own columns: their names and cells."""
    detail = row.detail
    if "kinds" in detail:
        return [column for kind, found in detail["kinds"].items() for column in (
            (f"{kind}: KL", f"{found['kl']:.4f}"), ("±", f"{interval(found['each']):.4f}"),
            (f"{kind}: top-1", f"{found['agreement']:.1%}"),
        )]  # fmt: skip
    if "intervals" in detail:
        places = sorted(detail["by_position"], key=int)
        length = statistics.fmean(one["length"] for one in detail["each"])
        return [
            ("KL", f"{row.score:.4f}"), ("±", f"{interval(paired(row)):.4f}"),
            *(column for name, place in (("first", places[0]), ("last", places[-1])) for column in (
                (f"{name} stretch", f"{detail['by_position'][place]:.4f}"), ("±", f"{detail['intervals'][place]:.4f}"),
            )),
            ("length", f"{length:,.0f}"),
        ]  # fmt: skip
    if row.metric == "perplexity":
        return [("perplexity", f"{row.score:.3f}")]
    return [(row.metric, f"{row.score:.1%}")]


def paired(row: ResultRow) -> list[float]:
    """What is paired with another method's: each window's distance or nats per token, or each answer's points."""
    if "kinds" in row.detail:
        return row.detail["kinds"]["forced"]["each"]
    return row.detail.get("nats") or [
        one["kl"] if "kl" in one else 100 * one["score"] for one in row.detail.get("each", [])
    ]


def difference(row: ResultRow, others: Mapping[str, ResultRow]) -> tuple[str, str, str]:
    """Mean and 95 % interval of the paired differences to the other row of the cell, and the number of pairs.

    Empty for the others themselves, and where a cell has no pairs.
    """
    other = others.get(row.cell)
    if other is None or other is row or not paired(row) or row.samples != other.samples:
        return "", "", ""
    each = [mine - theirs for mine, theirs in zip(paired(row), paired(other), strict=True)]
    digits = 1 if is_share(row) else 4
    return f"{statistics.fmean(each):+.{digits}f}", f"{interval(each):.{digits}f}", str(len(each))


def failed_cells(rows: Sequence[ResultRow]) -> set[str]:
    """The cells of one task in which the uncompiled model itself finds too little to be evidence."""
    return {row.cell for row in rows if row.method == UNCOMPILED and row.task not in NO_QUESTION and row.score < GATE}
