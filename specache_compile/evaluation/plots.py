"""The plot of a task: score against device KV, with the rows' provenance at its foot."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from .cell_tables import failed_cells, is_distance
from .intervals import interval
from .result_rows import ResultRow, sources
from .settings import UNCOMPILED


def draw(rows: Sequence[ResultRow], folder: Path) -> list[Path]:
    """Draw a plot for each task, and return their paths. Requires matplotlib."""
    made = []
    for task in dict.fromkeys(row.task for row in rows):
        mine = [row for row in rows if row.task == task]
        failed = failed_cells(mine)
        shown = [row for row in mine if row.cell not in failed and row.kv_ratio is not None]
        # The full cache is at no distance, which a logarithmic axis does not have.
        shown = [row for row in shown if row.method != UNCOMPILED or not is_distance(row)]
        if shown:
            made.append(folder / f"{task}-kv.png")
            draw_task(shown, made[-1])
    return made


def draw_task(rows: Sequence[ResultRow], path: Path) -> None:
    """Plot the score, or the distance, against the device's share of the full cache's bytes.

    The plot has a panel for each kind of continuation, and a line over the cells for each method.
    """
    from matplotlib.figure import Figure

    panels = list(rows[0].detail.get("kinds", [rows[0].metric]))
    figure = Figure(figsize=(4 * len(panels) + 2, 3.8))
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)
    for axis, panel in zip(axes.flat, panels, strict=True):
        for number, method in enumerate(dict.fromkeys(row.method for row in rows)):
            points = sorted((row.kv_ratio or 0.0, *point_of(row, panel)) for row in rows if row.method == method)
            axis.errorbar(*zip(*points, strict=True), label=method, marker="os^Dv"[number // 10 % 5], capsize=2)
        axis.set(title=panel, xlabel="device KV / full cache", yscale="log" if is_distance(rows[0]) else "linear")
        axis.grid(alpha=0.3)
    axes.flat[0].set_ylabel("KL to the full cache, nats" if is_distance(rows[0]) else rows[0].metric)
    axes.flat[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    foot = "\n".join(textwrap.fill(line, int(figure.get_size_inches()[0] * 24)) for line in sources(rows))
    figure.text(0.005, -0.01, foot, fontsize=5, va="top", color="gray")
    figure.savefig(path, bbox_inches="tight")


def point_of(row: ResultRow, panel: str) -> tuple[float, float]:
    """A row's value in a panel, and half of its 95 % interval; 0 where the row has none."""
    kind = row.detail.get("kinds", {}).get(panel)
    return (row.score, 0.0) if kind is None else (kind["kl"], interval(kind["each"]))
