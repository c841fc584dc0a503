"""Profile a decode step by op. Between the ops is Python: generated code, the model, Dynamo's guards, the session."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

# Steps of a profile.
PROFILED = 8
STEP = "specache bench step"
# Inductor options with which kernels appear in a profile.
KERNELS_SHOW = {"cpp.enable_kernel_profile": True}
PYTHON, OTHERS, KERNELS = "Python", "other ops", "Inductor's kernels"
# The lines of the table, and their ops: of this package, without `_fused`, and of torch.
LINES = {
    "linear layers": (
        "few_rows", "few_rows_each", "linear", "mm", "addmm", "bmm", "_linear_pointwise",
    ),
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
ORDER = (*LINES, KERNELS, OTHERS, PYTHON)
KERNEL = re.compile(r"graph_\d+_|cpp_|kernel_cpp_")


def profiled(step: Callable[[], None]) -> list[dict[str, Any]]:
    """The table lines of a profile over `PROFILED` calls: each has its name, its calls and milliseconds per step."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(PROFILED):
            with record_function(STEP):
                step()
    spent, calls = defaultdict[str, float](float), Counter[str]()
    for event in found.events():
        if event.name == STEP:
            spent[PYTHON] += event.time_range.elapsed_us()
            for line, microseconds in ops_of(event):
                spent[line] += microseconds
                spent[PYTHON] -= microseconds
                calls[line] += 1
    return [
        {"line": line, "calls": calls[line] / PROFILED, "ms": spent[line] / PROFILED / 1e3}
        for line in ORDER if line in spent
    ]  # fmt: skip


def ops_of(event: Any) -> Iterator[tuple[str, float]]:
    """The line and the microseconds of each op within an event; an op includes the ops that it calls."""
    for child in event.cpu_children:
        line = line_of(child.name)
        if line is None:
            yield from ops_of(child)
        else:
            yield line, child.time_range.elapsed_us()


def line_of(event: str) -> str | None:
    """The line of an op or a kernel; None for an event that only contains other events."""
    name = event.partition("::")[2]
    if not name:
        return KERNELS if KERNEL.match(event) else None
    return LINE_OF.get(name.removesuffix("_fused"), OTHERS)
