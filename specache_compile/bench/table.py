"""The rows of `specache bench` as a table, and those of the demo as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
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


def pyplot() -> Any:
    """Matplotlib without a window; SpecacheError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise SpecacheError("plots require matplotlib. Run pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw(rows: Rows, path: Path, labels: Mapping[str, str]) -> None:
    """Draw the demo's plot: a bar for each method's bytes on the device, and one for its median decode step. Requires
    matplotlib.

    labels: the methods' names in the plot.
    """
    plt = pyplot()
    panels = (
        ("KV bytes on the device", "% of the full 16-bit cache", [100 * row["of_16_bits"] for row in rows]),
        ("a decode step", "ms, median", [row["step_ms"] for row in rows]),
    )
    figure, axes = plt.subplots(1, 2, figsize=(8, 1.4 + 0.5 * len(rows)), sharey=True, layout="constrained")
    for axis, (title, unit, values) in zip(axes, panels, strict=True):
        bars = axis.barh(range(len(rows)), values, color=plt.get_cmap("Blues")(0.5))
        axis.bar_label(bars, [f"{value:.{0 if max(values) >= 10 else 1}f}" for value in values], padding=3)
        axis.set(title=title, xlabel=unit, xlim=(0, 1.2 * max(values)))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(rows)), [f"{labels[row['method']]}\n{keys_found(row)} keys found" for row in rows])
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=200)
    plt.close(figure)


def keys_found(row: Mapping[str, Any]) -> str:
    """The number of keys found, of all."""
    return f"{sum(key['found'] for key in row['keys'])} of {len(row['keys'])}"
