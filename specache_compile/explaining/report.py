"""`report.html`: an explanation as one page that needs no network and no other file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from . import tables
from .figures import Figures
from .outline import Section, changes, folded, only_changed, rows_of
from .tables import COMPUTED, counted, duration, grouped, size
from .times.op_launches import STREAMS

TIMELINE_WIDTH, LANE_HEIGHT = 1200, 32  # px, before zooming


@dataclass(frozen=True)
class BarPart:
    """One piece of a stacked bar; percent of the longest bar."""

    tier: str
    bytes: int
    percent: float


@dataclass(frozen=True)
class Bar:
    """One launch in the timeline; px."""

    x: float
    y: float
    width: float
    op: str
    label: str


def write_report(e: Figures, path: Path) -> None:
    """Render the page from its template."""
    loader = jinja2.PackageLoader("specache_compile.explaining", ".")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    path.write_text(environment.get_template("report.html.jinja").render(**contents(e)), encoding="utf-8")


def contents(e: Figures) -> dict[str, Any]:
    """The template's contents as text and numbers."""
    data: dict[str, Any] = {
        "e": e, "computed": COMPUTED, "bars": memory_bars(e), "phases": phases(e), "size": size,
        "duration": duration, "counted": counted, "sites": sites(e), "layers": layer_rows(e),
    }  # fmt: skip
    if e.is_timed:
        data.update(
            step=e.step(), full_step=e.full_step(), break_even=e.break_even(), largest=e.largest_batch(),
            costs=tables.by_op(e.spans), cost_headers=tables.OP_HEADERS, timeline=timeline(e),
            launches=[(s.kernel, tables.span_cells([s]), s.bound) for s in e.spans],
            step_times=tables.step_time_rows(e), step_time_headers=tables.STEP_TIME_HEADERS,
            step_time_note=tables.step_time_note(e),
        )  # fmt: skip
    return data


def sites(e: Figures) -> list[tuple[Any, ...]]:
    return grouped((s.model_layer, (s.query_heads, s.heads, s.head_dim, s.softcap or "-")) for s in e.sites)


def layer_rows(e: Figures) -> list[tuple[Any, ...]]:
    """Bytes of each tier for each layer; layers that are alike share a row."""
    pairs = zip(e.sites, e.bytes_by_layer, strict=True)
    return grouped((site.model_layer, tuple(map(size, tiers.values()))) for site, tiers in pairs)


def memory_bars(e: Figures) -> list[tuple[str, int, list[BarPart]]]:
    """Device and host memory with specache, and the device memory of a 16-bit cache, on one scale."""
    tiers = e.bytes_by_tier
    weights = {"weights": e.weight_bytes}
    bars = {
        "device, specache": {**weights, **{tier: b for tier, b in tiers.items() if tier != "host"}},
        "host, specache": {"host": tiers.get("host", 0)},
        "device, 16-bit cache": {**weights, "full cache": e.full_cache_bytes},
    }
    longest = max(1, *(sum(parts.values()) for parts in bars.values()))
    return [
        (title, sum(parts.values()), [BarPart(tier, b, 100 * b / longest) for tier, b in parts.items() if b])
        for title, parts in bars.items()
    ]


def timeline(e: Figures) -> dict[str, Any]:
    """One step of a running generation: the launches of each stream, and a time axis."""
    end = max(span.end for span in e.spans)
    scale, bars = TIMELINE_WIDTH / end, []
    for span in e.spans:
        kernel = span.kernel
        x, width = span.start * scale, max((span.end - span.start) * scale, 0.3)
        y = 22 + STREAMS.index(kernel.stream) * (LANE_HEIGHT + 14)
        label = f"{kernel.op}, layer {kernel.layer}, {duration(span.end - span.start)}, bound by {span.bound}"
        bars.append(Bar(x, y, width, kernel.op, label))
    bars.sort(key=lambda bar: (bar.y, bar.x))
    ticks = [(i * TIMELINE_WIDTH / 8, duration(end * i / 8)) for i in range(9)]
    return {"bars": bars, "ticks": ticks, "width": TIMELINE_WIDTH, "lane": LANE_HEIGHT, "streams": STREAMS,
            "height": 22 + len(STREAMS) * (LANE_HEIGHT + 14),
            "ops": list(dict.fromkeys(bar.op for bar in bars))}  # fmt: skip


def phases(e: Figures) -> list[dict[str, Any]]:
    """Each phase's final graph folded by layer, and each pass's changes."""
    result = []
    for phase, trace in e.traces.items():
        stages = {name: rows_of(code) for name, code in trace.graphs.items()}
        names = list(stages)
        steps: list[tuple[Any, list[Section]]] = []
        for report, before, after in zip(trace.reports, names, names[1:], strict=False):
            same = trace.graphs[before] == trace.graphs[after]
            steps.append((report, [] if same else only_changed(folded(changes(stages[before], stages[after])))))
        result.append({"name": phase, "hash": trace.hash, "passes": steps, "final": folded(stages[names[-1]]),
                       "nodes": len(stages[names[-1]])})  # fmt: skip
    return result
