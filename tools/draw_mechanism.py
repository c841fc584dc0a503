"""Draw docs/mechanism.png: where pairs are stored, and when they are copied.

python tools/draw_mechanism.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from specache_compile.methods import parse_options
from specache_compile.methods.field import LayerShape
from specache_compile.runtime.state import full_cache_bytes, predicted_bytes

TO = Path(__file__).parents[1] / "docs" / "mechanism.png"
# Boxes carry their own colour, on a card with a border: the picture is legible on light and on dark pages.
HOST, LOW, EXACT, INK, CARD = "#cfe3f5", "#fde3b8", "#c9ead0", "#222222", "#ffffff"
SIZE = 13
# The KV cache of Llama-3-8B: 32 layers of 8 heads with 128 channels, in bfloat16.
SHAPE = [LayerShape(8, 128, torch.bfloat16, torch.device("meta"), number) for number in range(32)]
TOKENS = 32_768


def box(ax: Axes, place: tuple[float, float, float, float], text: str, color: str) -> None:
    """Draw a rounded box at (left, bottom, width, height) with text in its middle."""
    left, bottom, width, height = place
    style = "round,pad=0,rounding_size=1.2"
    ax.add_patch(FancyBboxPatch((left, bottom), width, height, boxstyle=style, facecolor=color, edgecolor=INK))
    ax.text(left + width / 2, bottom + height / 2, text, ha="center", va="center", fontsize=SIZE, color=INK)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], text: str) -> None:
    """Draw a straight arrow from edge to edge with text above its middle."""
    style = {"arrowstyle": "-|>", "mutation_scale": 20, "linewidth": 2, "shrinkA": 0, "shrinkB": 0, "color": INK}
    ax.add_patch(FancyArrowPatch(start, end, **style))
    middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 1.5
    ax.text(*middle, text, ha="center", va="bottom", fontsize=SIZE, color=INK)


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.0f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB"


def main() -> None:
    tiers = predicted_bytes(parse_options({}), SHAPE, 1, TOKENS)
    full = full_cache_bytes(SHAPE, 1, TOKENS)
    device = sum(size for tier, size in tiers.items() if tier != "host")
    figure, ax = plt.subplots(figsize=(9, 4), facecolor=CARD, edgecolor="#888888", linewidth=3)
    figure.subplots_adjust(0.02, 0.02, 0.98, 0.98)
    ax.set_xlim(-1, 119)
    ax.set_ylim(0, 62)
    ax.axis("off")
    title = f"Llama-3-8B, {TOKENS // 1024}k tokens: {mebibytes(full)} of KV cache, {mebibytes(device)} on the GPU"
    ax.text(0, 58, title, fontsize=SIZE + 3, fontweight="bold", color=INK)
    box(ax, (0, 3, 28, 46), f"host memory\n\nall KV pairs\nin 8 bits\n\n{mebibytes(tiers['host'])}", HOST)
    ax.text(80, 52, "GPU memory", ha="center", fontsize=SIZE, color=INK)
    box(ax, (60, 35, 40, 14), f"low-bit copy: all pairs\nin 1.5 bits, {mebibytes(tiers['low-bit'])}", LOW)
    box(ax, (60, 19, 40, 14), f"slots: the 64 pairs per head\nthat matter now, {mebibytes(tiers['slots'])}", EXACT)
    box(ax, (60, 3, 40, 14), f"window: the newest pairs\nin 16 bits, {mebibytes(tiers['recent'])}", EXACT)
    arrow(ax, (28, 26), (60, 26), "fetch selected pairs")
    arrow(ax, (60, 10), (28, 10), "offload new pairs")
    curve = {"arrowstyle": "-|>", "mutation_scale": 20, "linewidth": 2, "connectionstyle": "arc3,rad=-0.5"}
    ax.add_patch(FancyArrowPatch((100.5, 42), (100.5, 26), color=INK, **curve))
    ax.text(105.5, 34, "attention\nselects", ha="left", va="center", fontsize=SIZE, color=INK)
    figure.savefig(TO, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
