"""The demo's rows as answers side by side, as a table, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from .asking import QUESTION
from .rows import DEFAULT, DENSE, FULL, Row

MIB = 1 << 20
# Each tier's name and colour in the picture.
TIERS = {
    DENSE: ("all pairs in 16 bits, on the device", "0.55"),
    "low-bit": ("low-bit tier, on the device", "tab:orange"),
    "recent": ("newest tokens, on the device", "tab:green"),
    "slots": ("fetched pairs, on the device", "tab:purple"),
    "sinks": ("first tokens, on the device", "tab:red"),
    "host": ("all pairs, on the host (16 or 8 bits)", "0.88"),
}


def answers(rows: Sequence[Row]) -> str:
    """Each method's answer to the one question."""
    lines = [(row.method, next(iter(row.answer.splitlines()), "")) for row in rows]
    return f"{QUESTION.strip()}\n" + tabulate(lines, tablefmt="plain", disable_numparse=True)


def table(rows: Sequence[Row]) -> str:
    """A line for each method: keys found, the device's share of the cache, a compiled step at each context and its
    ratio to the full cache's."""
    contexts = list(rows[0].step_ms)
    full = next((row.step_ms for row in rows if row.method == FULL), {})
    lines = [
        (
            row.method, f"{sum(row.keys.values()):.0f} of {len(row.keys)}", f"{row.kv_ratio:.3f}",
            *(step(row.step_ms.get(context), full.get(context)) for context in contexts),
        )
        for row in rows
    ]  # fmt: skip
    headers = ("", "keys found", "device KV", *(f"a step at {context:,}" for context in contexts))
    return tabulate(lines, headers, colalign=("left", *["right"] * (len(headers) - 1)), disable_numparse=True)


def step(milliseconds: float | None, full: float | None) -> str:
    if milliseconds is None:
        return ""
    return f"{milliseconds:.1f} ms" + (f" ({milliseconds / full:.2f})" if full else "")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Three panels: keys by depth, bytes by tier, a step against the context (left out where none was timed)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = bool(rows[0].step_ms)
    figure, axes = plt.subplots(1, 2 + timed, figsize=(4.4 * (2 + timed) + 1.5, 4), layout="constrained")
    draw_keys(axes[0], rows)
    draw_bytes(axes[1], rows)
    if timed:
        draw_steps(axes[2], rows)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_keys(axis: Any, rows: Sequence[Row]) -> None:
    """A line for each method, a column for each depth."""
    depths = list(rows[0].keys)
    axis.imshow([list(row.keys.values()) for row in rows], vmin=-0.2, vmax=1.2, cmap="RdYlGn", aspect="auto")
    for line, row in enumerate(rows):
        for column, found in enumerate(row.keys.values()):
            axis.text(column, line, "found" if found else "lost", ha="center", va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), [row.method for row in rows], fontsize=8)
    axis.set_xticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axis.set(title="quality: keys by depth", xlabel="depth of the key in the text")


def draw_bytes(axis: Any, rows: Sequence[Row]) -> None:
    """A bar for each method."""
    names = dict.fromkeys(name for row in rows for name in row.tiers)
    lefts = [0.0] * len(rows)
    for name in sorted(names, key=list(TIERS).index):
        label, colour = TIERS[name]
        sizes = [row.tiers.get(name, 0) / MIB for row in rows]
        axis.barh(range(len(rows)), sizes, left=lefts, label=label, color=colour)
        lefts = [left + size for left, size in zip(lefts, sizes, strict=True)]
    for line, row in enumerate(rows):
        on_device = sum(size for name, size in row.tiers.items() if name != "host") / MIB
        axis.text(on_device, line, f" {row.kv_ratio:.2f}", va="center", fontsize=9, weight="bold")
    axis.set_yticks(range(len(rows)), [""] * len(rows))
    axis.invert_yaxis()
    axis.set(title="bytes: the cache by tier", xlabel="MiB; the device's share", xlim=(0, 1.1 * max(lefts)))
    axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


def draw_steps(axis: Any, rows: Sequence[Row]) -> None:
    """A line for each method; the middle half of its steps is shaded."""
    for row in (row for row in rows if row.step_ms):
        contexts = list(row.step_ms)
        strong = row.method in (FULL, DEFAULT)
        label = f"{row.method}, torch.compile" if row.method == FULL else row.method
        (line,) = axis.plot(contexts, row.step_ms.values(), marker="o", label=label, linewidth=2.5 if strong else 1.2)
        ends = zip(*row.step_ms_half.values(), strict=True)
        axis.fill_between(contexts, *ends, alpha=0.15, color=line.get_color())
    axis.set(title="time: a compiled decode step", xlabel="tokens of context", ylabel="ms", ylim=(0, None))
    axis.legend(fontsize=7)
