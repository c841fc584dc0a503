"""The rows of `specache bench` as tables, and as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from specache_compile.errors import SpecacheError

from .profile import layers_of

Rows = Sequence[dict[str, Any]]
MIB = 1 << 20


def steps_table(rows: Rows) -> str:
    """A line for each method, context and batch size."""
    compiled = {(row["context"], row["batch"]): row["step_ms"] for row in rows if row["method"] == "compiled"}
    extended = any("extend_ms" in row for row in rows)
    lines = []
    for row in sorted(rows, key=lambda row: (row["context"], row["batch"])):
        plain = compiled.get((row["context"], row["batch"]))
        low, high = row["step_ms_half"]
        lines.append((
            f"{row['context']:,}", row["batch"], row["method"], f"{row['step_ms']:.1f}", f"{low:.1f} to {high:.1f}",
            f"{row['step_ms'] / plain:.2f}" if plain else "",
            f"{row['of_floor']:.1f}" if "of_floor" in row else "",
            f"{row['first_token_s']:.2f}" if "first_token_s" in row else "",
            f"{1e3 * row['second_token_s']:.0f}" if "second_token_s" in row else "",
            *([f"{row['extend_ms']:,.0f}" if "extend_ms" in row else ""] if extended else []),
            f"{row['device_bytes'] / MIB:.1f}", f"{row['host_bytes'] / MIB:.0f}",
        ))  # fmt: skip
    headers = (
        "context", "batch", "", "ms a step", "middle half", "of compiled", "of the floor", "first token, s",
        "second, ms", *(["several, ms"] if extended else []), "device MiB", "host MiB",
    )  # fmt: skip
    align = ("right", "right", "left", *["right"] * (len(headers) - 3))
    return tabulate(lines, headers, colalign=align, disable_numparse=True)


def profile_table(rows: Rows) -> str:
    """Where each method's step goes: lines of `profile.py`."""
    lines = []
    for row in sorted(rows, key=lambda row: (row["context"], row["batch"])):
        whole = sum(line["ms"] for line in row.get("profile", ()))
        for line in row.get("profile", ()):
            layers = layers_of(line, row["profile"])
            lines.append((
                f"{row['context']:,}", row["batch"], row["method"], line["line"], f"{line['calls']:.0f}",
                f"{line['ms']:.2f}", f"{line['ms'] / whole:.0%}",
                *((f"{1e3 * statistics.median(layers):.0f}", f"{1e3 * min(layers):.0f} to {1e3 * max(layers):.0f}")
                  if layers else ("", "")),
            ))  # fmt: skip
    headers = ("context", "batch", "", "of a step", "calls", "ms", "share", "a layer, µs", "least to most")
    align = ("right", "right", "left", "left", *["right"] * 5)
    return tabulate(lines, headers, colalign=align, disable_numparse=True)


def answers_table(rows: Rows) -> str:
    """Seconds to the first answer of a process, eight tokens behind a hundred."""
    headers = {"cold_s": "nothing compiled, s", "warm_s": "a warm folder, s", "kept_s": "traces kept, s"}
    shown = {name: header for name, header in headers.items() if any(name in row for row in rows)}
    lines = [(row["method"], *(f"{row[name]:.1f}" if name in row else "" for name in shown)) for row in rows]
    align = ("left", *["right"] * len(shown))
    return tabulate(lines, ("first answer", *shown.values()), colalign=align, disable_numparse=True)


def draw(rows: Rows, path: Path) -> None:
    """A step against the context, a line for each method, at each batch size. Needs matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise SpecacheError("--plot: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    batches = sorted({row["batch"] for row in rows})
    figure, axes = plt.subplots(1, len(batches), figsize=(5.2 * len(batches), 4), squeeze=False, layout="constrained")
    for axis, batch in zip(axes[0], batches, strict=True):
        for method in dict.fromkeys(row["method"] for row in rows):
            mine = sorted(
                (r for r in rows if r["method"] == method and r["batch"] == batch), key=lambda r: r["context"]
            )
            if not mine:
                continue
            contexts, steps = ([row[name] for row in mine] for name in ("context", "step_ms"))
            axis.plot(contexts, steps, marker="o", label=method, linewidth=2.5 if method == "specache" else 1.2)
            ends = zip(*(row["step_ms_half"] for row in mine), strict=True)
            axis.fill_between(contexts, *ends, alpha=0.15)
        axis.set(xlabel="tokens of context", ylabel="ms a decode step", title=f"batch {batch}", ylim=(0, None))
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)
