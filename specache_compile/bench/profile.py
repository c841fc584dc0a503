"""Profile a decode step by op and layer.

A step consists of parts of compiled code and of Python between them: the model, Dynamo's guards, the session. If layers
are alike, each is a part (`lowering/fold_layers.py`). The gaps of a part are generated Python that calls its kernels.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

# Steps of a profile.
PROFILED = 8
STEP, PART = "specache bench step", "## Call CompiledFxGraph"
# Inductor options with which kernels appear in a profile.
KERNELS_SHOW = {"cpp.enable_kernel_profile": True}
PYTHON, GAPS, OTHERS, KERNELS = "Python", "gaps", "other ops", "Inductor's kernels"
# The lines of the table, and their ops: of this package, without `_fused`, and of torch.
LINES = {
    "linear layers": ("linear", "mm", "addmm", "bmm", "_linear_pointwise"),
    "low-bit scores": ("score_low_bit",),
    "choice": ("select_topk",),
    "correction": ("correct",),
    "values": ("attend_scored",),
    "attention": ("decode_attention", "scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    "fetches": ("prefetch", "wait"),
    "appends": ("append",),
    "offloads": ("offload",),
}  # fmt: skip
LINE_OF = {op: line for line, ops in LINES.items() for op in ops}
# In the order of the table.
ORDER = (*LINES, KERNELS, OTHERS, GAPS, PYTHON)
KERNEL = re.compile(r"graph_\d+_|cpp_|kernel_cpp_")

Row = dict[str, Any]
Spent = defaultdict[str, defaultdict[int, float]]  # microseconds by line and part


def profiled(step: Callable[[], None]) -> list[Row]:
    """The table lines of a profile over `PROFILED` calls.

    Each has its name, its calls and milliseconds per step, and the milliseconds in each part, in execution order.
    """
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(PROFILED):
            with record_function(STEP):
                step()
    spent: Spent = defaultdict(functools.partial(defaultdict, float))
    calls: Counter[str] = Counter()
    parts = 0
    for event in found.events():
        if event.name == STEP:
            parts = max(parts, count(event, spent, calls))
    return [row_of(line, spent[line], calls[line], parts) for line in ORDER if line in spent]


def row_of(line: str, spent: dict[int, float], calls: int, parts: int) -> Row:
    by_part = [spent[part] / PROFILED / 1e3 for part in range(parts)]
    return {
        "line": line, "calls": calls / PROFILED, "ms": sum(spent.values()) / PROFILED / 1e3, "ms_by_part": by_part,
    }  # fmt: skip


def count(step: Any, spent: Spent, calls: Counter[str]) -> int:
    """Add one step's microseconds by line and part, and its calls. Part -1 is what runs outside of all parts. Returns
    how many parts there are."""
    parts = 0

    def walk(event: Any, part: int) -> float:
        """Microseconds of the ops, and the parts, within an event."""
        nonlocal parts
        inside = 0.0
        for child in event.cpu_children:
            whole = child.time_range.elapsed_us()
            line = line_of(child.name)
            if child.name.startswith(PART):
                spent[GAPS][parts] += whole
                parts += 1
                spent[GAPS][parts - 1] -= walk(child, parts - 1)
            elif line is not None:
                spent[line][part] += whole
                calls[line] += 1
            else:
                whole = walk(child, part)
            inside += whole
        return inside

    spent[PYTHON][-1] += step.time_range.elapsed_us() - walk(step, -1)
    return parts


def line_of(event: str) -> str | None:
    """The line of an op or a kernel; None for an event that only contains other events."""
    name = event.partition("::")[2]
    if not name:
        return KERNELS if KERNEL.match(event) else None
    return LINE_OF.get(name.removesuffix("_fused"), OTHERS)


def layers_of(row: Row, rows: Sequence[Row]) -> list[float]:
    """A line's milliseconds in each layer, that is, in each part with an attention; [] if a part has several layers."""
    attentions = [r for r in rows if r["line"] in ("low-bit scores", "attention")]
    held = [part for part in range(len(row["ms_by_part"])) if any(r["ms_by_part"][part] for r in attentions)]
    one_each = len(held) == sum(r["calls"] for r in attentions)
    return [row["ms_by_part"][part] for part in held] if one_each else []
