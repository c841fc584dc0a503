"""A diagnostic's results on disk: points as JSON and CSV with their provenance, and the picture."""

from __future__ import annotations

import csv
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from . import Diagnostic
from .point import Point

# Beyond as many layers as matplotlib has colours, layers are gray behind their mean.
COLOURS = 10


def read(path: Path, key: str) -> tuple[list[Point], str] | None:
    """The points and the provenance of a finished run with the same key; None where there is none."""
    try:
        found = json.loads(path.read_text())
        return ([Point(**p) for p in found["points"]], found["provenance"]) if found["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(path: Path, what: str, key: str, points: Sequence[Point], provenance: str) -> None:
    """Write NAME.json and NAME.csv. The JSON is replaced at once, never left half written."""
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("curve", "x", "y", "count"))
        writer.writerows((p.curve, p.x, p.y, p.count) for p in points)
    found = {"what": what, "key": key, "provenance": provenance, "points": [asdict(point) for point in points]}
    torn = path.with_suffix(".tmp")
    torn.write_text(json.dumps(found, indent=1) + "\n")
    torn.replace(path)


def draw(path: Path, diagnostic: Diagnostic, points: Sequence[Point], provenance: str) -> None:
    """A coloured line for each curve; beyond COLOURS layers only the mean has a colour. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4))
    curves = list(dict.fromkeys(point.curve for point in points))
    layers = [curve for curve in curves if curve.startswith("layer ")]
    gray = layers if len(layers) > COLOURS else []
    labels = {curve: "a layer" if curve == layers[0] else None for curve in gray}
    for curve in curves:
        mine = [point for point in points if point.curve == curve]
        marker, color = "." if len(mine) < 20 else None, "silver" if curve in gray else None
        axis.plot([p.x for p in mine], [p.y for p in mine], marker=marker, color=color, label=labels.get(curve, curve))
    if diagnostic.log:
        ticks = sorted({point.x for point in points})
        axis.set_xscale("log")
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
    axis.set_xlabel(diagnostic.x, fontsize=9)
    axis.set_ylabel(diagnostic.y, fontsize=9)
    axis.set_title(diagnostic.what, fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.text(0.005, -0.01, textwrap.fill(provenance, 165), fontsize=5, va="top", color="gray")
    figure.savefig(path, dpi=100, bbox_inches="tight")
    plt.close(figure)
