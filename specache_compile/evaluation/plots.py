"""The plots of an evaluation: depth × length, score against position, score against device KV.

Each has its provenance in one line at the bottom.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specache_compile.methods import parse_options

from .cell_tables import failed_cells
from .intervals import interval
from .result_rows import ResultRow, sources
from .settings import Setting, parse_setting

MARKERS = "os^Dv"


def draw(rows: Sequence[ResultRow], folder: Path) -> list[Path]:
    """Draw all plots that the rows allow, and return their paths. Requires matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    made = []
    for task in dict.fromkeys(row.task for row in rows):
        mine = [row for row in rows if row.task == task]
        for name, fits, drawing in PICTURES:
            chosen = [row for row in mine if fits(row)]
            if chosen:
                path = folder / f"{task}-{name}.png"
                save(drawing(chosen), chosen, path)
                made.append(path)
    return made


def save(figure: Any, rows: Sequence[ResultRow], path: Path) -> None:
    """Write a figure with its rows' provenance at its foot."""
    import matplotlib.pyplot as plt

    width = int(figure.get_size_inches()[0] * 24)
    foot = "\n".join(textwrap.fill(line, width) for line in sources(rows))
    figure.text(0.005, -0.01, foot, fontsize=5, va="top", color="gray")
    figure.savefig(path, dpi=100, bbox_inches="tight")
    plt.close(figure)


def depth_by_length(rows: Sequence[ResultRow]) -> Any:
    """One panel a method: the share of the needles found at each depth (down) and length (across)."""
    import matplotlib.pyplot as plt

    methods = list(dict.fromkeys(row.method for row in rows))
    columns = min(4, len(methods))
    lines = -(-len(methods) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(3.1 * columns + 1, 2.7 * lines + 0.5), squeeze=False, layout="constrained"
    )
    image: Any = None
    for axis in axes.flat[len(methods) :]:
        axis.set_visible(False)
    for axis, method in zip(axes.flat, methods, strict=False):
        mine = sorted((row for row in rows if row.method == method), key=lambda row: row.context)
        depths = sorted({one["depth"] for row in mine for one in row.detail["each"]})
        grid = [[share_at(row, depth) for row in mine] for depth in depths]
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto", interpolation="nearest")
        ratio = mine[-1].kv_ratio
        foot = "" if ratio is None else f", device KV {ratio:.2f}"
        axis.set_title(f"{method}\n{sum(row.score for row in mine) / len(mine):.0%} found{foot}", fontsize=8)
        axis.set_xticks(range(len(mine)), [f"{row.context:,}" for row in mine], fontsize=7)
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=6)
    figure.supxlabel("context, tokens", fontsize=9)
    figure.supylabel("depth of the needle", fontsize=9)
    figure.colorbar(image, ax=axes, label="keys found", shrink=0.8)
    return figure


def share_at(row: ResultRow, depth: float) -> float:
    scores = [one["score"] for one in row.detail["each"] if one["depth"] == depth]
    return sum(scores) / len(scores) if scores else float("nan")


def by_position(rows: Sequence[ResultRow]) -> Any:
    """One panel a length: the figure against the position of the token, a curve a method."""
    import matplotlib.pyplot as plt

    lengths = list(dict.fromkeys(row.cell for row in rows))
    figure, axes = plt.subplots(1, len(lengths), figsize=(4 * len(lengths) + 1, 3.4), squeeze=False)
    for axis, length in zip(axes.flat, lengths, strict=True):
        for row in (row for row in rows if row.cell == length):
            points, intervals = row.detail["by_position"], row.detail.get("intervals", {})
            places, half = [int(position) for position in points], [intervals.get(position, 0.0) for position in points]
            axis.errorbar(places, list(points.values()), half, marker=".", capsize=2, label=row.method)
        if "intervals" in rows[0].detail:  # distances of many sizes
            axis.set_yscale("log")
        axis.set_title(f"context {length}", fontsize=9)
        axis.set_xlabel("token position", fontsize=8)
        axis.set_ylabel(rows[0].metric, fontsize=8)
        axis.grid(alpha=0.3)
    axes.flat[-1].legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    return figure


def against_kv(rows: Sequence[ResultRow]) -> Any:
    """Mean score over cells against the device's share of the full cache, a mark for each method. Cells that the
    uncompiled model itself fails are left out."""
    import matplotlib.pyplot as plt

    failed = failed_cells(rows)
    rows = [row for row in rows if row.cell not in failed] or rows
    figure, axis = plt.subplots(figsize=(7, 3.6))
    methods = list(dict.fromkeys(row.method for row in rows))
    for i, method in enumerate(methods):
        mine = [row for row in rows if row.method == method]
        ratios = [row.kv_ratio for row in mine if row.kv_ratio is not None]
        x, y = sum(ratios) / len(ratios), sum(row.score for row in mine) / len(mine)
        axis.plot(x, y, MARKERS[i // 10 % len(MARKERS)], color=f"C{i % 10}", label=method, markersize=6)
    axis.set_xlabel("device KV / full cache (mean over cells)", fontsize=8)
    axis.set_ylabel(f"{rows[0].metric} (mean over cells)", fontsize=8)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    return figure


def distance(rows: Sequence[ResultRow]) -> Any:
    """A plot of the KL to the full cache against the device's share of the full cache's bytes.

    It has a panel for each kind of continuation, and a line over the bits for each method and length.
    """
    import matplotlib.pyplot as plt

    kinds = list(rows[0].detail["kinds"])
    figure, axes = plt.subplots(1, len(kinds), figsize=(4 * len(kinds) + 2, 3.8), squeeze=False, sharey=True)
    lines: dict[tuple[str, str], list[tuple[str, ResultRow]]] = {}
    for row in rows:
        method, bits = method_and_bits(row.method)
        lines.setdefault((method, row.cell), []).append((bits, row))
    methods = list(dict.fromkeys(method for method, _ in lines))
    for line in lines.values():
        line.sort(key=lambda point: point[1].kv_ratio or 0.0)
    for axis, kind in zip(axes.flat, kinds, strict=True):
        for (method, _), line in lines.items():
            i = methods.index(method)
            ratios, points = [row.kv_ratio for _, row in line], [row.detail["kinds"][kind] for _, row in line]
            halves = [interval(point["each"]) for point in points]
            axis.errorbar(
                ratios, [p["kl"] for p in points], halves, color=f"C{i % 10}", label=method,
                marker=MARKERS[i // 10 % len(MARKERS)], markersize=5, capsize=2, linewidth=1,
            )  # fmt: skip
            for (bits, _), ratio, point in zip(line, ratios, points, strict=True):
                axis.annotate(bits, (ratio, point["kl"]), xytext=(5, 3), textcoords="offset points", fontsize=7)
        axis.set_yscale("log")
        axis.set_title(kind, fontsize=9)
        axis.set_xlabel("device KV / full cache", fontsize=8)
        axis.grid(alpha=0.3)
    axes.flat[0].set_ylabel("KL to the full cache, nats", fontsize=8)
    named = dict(zip(*reversed(axes.flat[-1].get_legend_handles_labels()), strict=True))
    axes.flat[-1].legend(named.values(), named.keys(), fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    return figure


def method_and_bits(text: str) -> tuple[str, str]:
    """A setting without its bits, and the bits in words; "" where it has none or where other options set them."""
    setting = parse_setting(text)
    if "memory" in dict(setting.given):
        return text, ""
    bits = getattr(parse_options(setting.options), "bits", None) if setting.options else None
    rest = Setting(setting.name, tuple(pair for pair in setting.given if pair[0] != "bits"))
    return str(rest), "" if bits is None else "1 bit" if bits == 1 else f"{bits} bits"


def has_even_depths(row: ResultRow) -> bool:
    each = row.detail.get("each", [])
    return row.task == "needle" and bool(each)


PICTURES: tuple[tuple[str, Callable[[ResultRow], bool], Callable[[Sequence[ResultRow]], Any]], ...] = (
    ("depth", has_even_depths, depth_by_length),
    ("position", lambda row: "by_position" in row.detail, by_position),
    ("kv", lambda row: row.kv_ratio is not None and "kinds" not in row.detail, against_kv),
    ("distance", lambda row: "kinds" in row.detail and (row.kv_ratio or 1) < 1, distance),
)
