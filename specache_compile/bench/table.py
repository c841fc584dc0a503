"""The rows of `specache bench` as tables and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tabulate import tabulate

from specache_compile.errors import SpecacheError

Rows = Sequence[dict[str, Any]]
MIB = 1 << 20


def steps_table(rows: Rows) -> str:
    """The table of decode steps: a line for each method, context and batch size, without columns that no row has."""
    compiled = {(row["context"], row["batch"]): row["step_ms"] for row in rows if row["method"] == "compiled"}

    def cell(row: dict[str, Any], name: str, digits: int, factor: float = 1.0) -> str:
        return f"{factor * row[name]:,.{digits}f}" if name in row else ""

    def line(row: dict[str, Any]) -> dict[str, str]:
        low, high = row["step_ms_half"]
        plain = compiled.get((row["context"], row["batch"]))
        return {
            "context": f"{row['context']:,}",
            "batch": str(row["batch"]),
            "": row["method"],
            "ms a step": cell(row, "step_ms", 1),
            "middle half": f"{low:.1f} to {high:.1f}",
            "of compiled": f"{row['step_ms'] / plain:.2f}" if plain else "",
            "first token, s": cell(row, "first_token_s", 2),
            "second, ms": cell(row, "second_token_s", 0, 1e3),
            "several, ms": cell(row, "extend_ms", 0),
            "prefill peak, MiB": cell(row, "prefill_peak_bytes", 0, 1 / MIB),
            "of 16 bits": cell(row, "of_16_bits", 3),
            "device MiB": cell(row, "device_bytes", 1, 1 / MIB),
            "host MiB": cell(row, "host_bytes", 0, 1 / MIB),
        }

    lines = [line(row) for row in sorted(rows, key=lambda row: (row["context"], row["batch"]))]
    kept = [name for name in lines[0] if any(one[name] for one in lines)]
    align = ["left" if not name else "right" for name in kept]
    return tabulate([[one[name] for name in kept] for one in lines], kept, colalign=align, disable_numparse=True)


def check_plot(path: Path) -> None:
    """SpecacheError if `draw` cannot write a file of this name."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise SpecacheError("--plot: pip install matplotlib") from None
    if path.suffix and path.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise SpecacheError(f"--plot {path}: matplotlib writes no such file. Use a suffix like .png, .pdf or .svg")


def draw(rows: Rows, path: Path, labels: Mapping[str, str] = MappingProxyType({})) -> None:
    """Draw two panels: the cache's bytes on the device and the median decode step. Requires matplotlib.

    Each method has a bar for each context and batch size.

    labels: the methods' names in the plot.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    methods = list(dict.fromkeys(row["method"] for row in rows))
    cells = sorted({(row["context"], row["batch"]) for row in rows})
    shares = all("of_16_bits" in row for row in rows)
    panels = (
        (
            "KV bytes on the device",
            "% of the full 16-bit cache" if shares else "MiB",
            lambda row: 100 * row["of_16_bits"] if shares else row["device_bytes"] / MIB,
        ),
        ("a decode step", "ms, median", lambda row: float(row["step_ms"])),
    )
    size = (8, 1.4 + len(methods) * (0.25 + 0.25 * len(cells)))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (title, unit, value) in zip(axes, panels, strict=True):
        most = max(value(row) for row in rows)
        for number, cell in enumerate(cells):
            mine = [row for row in rows if (row["context"], row["batch"]) == cell]
            height = 0.8 / len(cells)
            places = [methods.index(row["method"]) + (number - (len(cells) - 1) / 2) * height for row in mine]
            colour = colormaps["Blues"](0.5 + 0.4 * number / max(1, len(cells) - 1))
            bars = axis.barh(places, [value(row) for row in mine], height, color=colour, label=cell_name(*cell))
            axis.bar_label(bars, [f"{value(row):.{0 if most >= 10 else 1}f}" for row in mine], padding=3)
        axis.set(title=title, xlabel=unit, xlim=(0, 1.2 * most))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(methods)), [name_of(method, rows, labels) for method in methods])
    axes[0].invert_yaxis()
    if len(cells) > 1:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(cells))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)


def cell_name(context: int, batch: int) -> str:
    return f"{context:,} tokens" + (f" × {batch}" if batch > 1 else "")


def name_of(method: str, rows: Rows, labels: Mapping[str, str]) -> str:
    """A method's label and the number of keys found."""
    keys = next((row["keys"] for row in rows if row["method"] == method and "keys" in row), None)
    found = f"\n{sum(key['found'] for key in keys)} of {len(keys)} keys found" if keys else ""
    return labels.get(method, method) + found
