"""Draw docs/mechanism.png: where pairs are stored, and when they are copied.

python tools/draw_mechanism.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

TO = Path(__file__).parents[1] / "docs" / "mechanism.png"
# Of host memory, of the low-bit tier, of pairs in 16 bits on the device, of compute, of text.
HOST, LOW, EXACT, COMPUTE, INK = "#cfe3f5", "#fde3b8", "#c9ead0", "#e9e4f2", "#222222"
SIZE = 15


def box(ax: Axes, place: tuple[float, float, float, float], text: str, color: str, size: int = SIZE) -> None:
    """A rounded box at (left, bottom, width, height) with text in its middle."""
    left, bottom, width, height = place
    ax.add_patch(
        FancyBboxPatch(
            (left, bottom), width, height, boxstyle="round,pad=0,rounding_size=1.2", facecolor=color, edgecolor=INK
        )
    )
    ax.text(left + width / 2, bottom + height / 2, text, ha="center", va="center", fontsize=size, color=INK)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 22, "linewidth": 2.2, "color": INK}
    ax.add_patch(FancyArrowPatch(start, end, **style))


def panel(ax: Axes, title: str, height: float) -> None:
    ax.set_xlim(0, 100)
    ax.set_ylim(0, height)
    ax.axis("off")
    ax.set_title(title, loc="left", fontsize=SIZE + 4, fontweight="bold", color=INK)


def draw_tiers(ax: Axes) -> None:
    panel(ax, "Where the KV pairs are", 50)
    box(ax, (0, 8, 32, 36), "host memory\n\nevery pair,\n8 or 16 bits", HOST)
    box(ax, (60, 33, 40, 13), "low-bit copy: every pair,\n1 to 2 bits", LOW)
    box(ax, (60, 17.5, 40, 13), "slots: the k pairs\nthat matter now", EXACT)
    box(ax, (60, 2, 40, 13), "window: newest pairs,\n16 bits", EXACT)
    ax.text(80, 48, "device memory", ha="center", fontsize=SIZE, color=INK)
    arrow(ax, (33, 24), (59, 24))
    ax.text(46, 26, "fetch k pairs", ha="center", fontsize=SIZE, color=INK)
    arrow(ax, (59, 10), (33, 10))
    ax.text(46, 12, "offload", ha="center", fontsize=SIZE, color=INK)


def rows(ax: Axes, compute: float, copies: float) -> None:
    for place, name in ((compute, "compute"), (copies, "copies")):
        ax.text(0, place, name, va="center", fontsize=SIZE, color=INK)


def draw_one_lane(ax: Axes) -> None:
    panel(ax, "One lane, the default: each layer corrects itself", 34)
    rows(ax, 25, 8)
    box(ax, (15, 18, 23, 14), "scores by\nlow-bit keys", LOW)
    box(ax, (40, 18, 25, 14), "attend to\nlow-bit values", LOW)
    box(ax, (71, 18, 29, 14), "attend to\nslots and window", EXACT)
    box(ax, (38, 2, 34, 12), "fetch what is wanted\nand not in the slots", HOST)
    arrow(ax, (38, 18), (42, 14.5))
    arrow(ax, (72.5, 10), (79, 17.5))


def draw_two_lanes(ax: Axes) -> None:
    panel(ax, "Two lanes, as in the paper: one step ahead", 44)
    rows(ax, 29, 7)
    box(ax, (15, 29.5, 38, 11), "step t: output token", COMPUTE)
    box(ax, (15, 17, 38, 11), "step t: guess of the next", LOW)
    box(ax, (60, 29.5, 40, 11), "step t + 1: output token", COMPUTE)
    box(ax, (60, 17, 40, 11), "step t + 1: guess", LOW)
    box(ax, (36, 1.5, 39, 11), "fetch what the guess\nattends to", HOST)
    arrow(ax, (34, 16.5), (41, 13))
    arrow(ax, (75.5, 8), (84, 16.5))


def main() -> None:
    heights = (50, 34, 44)
    figure, axes = plt.subplots(3, 1, figsize=(9, 12), gridspec_kw={"height_ratios": heights, "hspace": 0.24})
    for ax, draw in zip(axes, (draw_tiers, draw_one_lane, draw_two_lanes), strict=True):
        draw(ax)
    figure.savefig(TO, dpi=110, bbox_inches="tight", pad_inches=0.15, metadata={"Software": None})


if __name__ == "__main__":
    main()
