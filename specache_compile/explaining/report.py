"""`report.html`: an explanation as one page that needs no network and no other file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from . import tables
from .figures import Figures
from .outline import Section, changes, folded, only_changed, rows_of
from .plan import STEADY
from .schedule import Schedule
from .tables import COMPUTED, by_op, cost_cells, counted, duration, grouped, share, size

TIMELINE_WIDTH, LANE_HEIGHT = 1200, 46  # px, before zooming


@dataclass(frozen=True)
class Part:
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
    critical: bool
    label: str


def write_report(e: Figures, path: Path) -> None:
    """Render the page from its template."""
    loader = jinja2.PackageLoader("specache_compile.explaining", ".")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    path.write_text(environment.get_template("report.html.jinja").render(**contents(e)), encoding="utf-8")


def contents(e: Figures) -> dict[str, Any]:
    """The template's contents as text and numbers."""
    data: dict[str, Any] = {
        "e": e, "computed": COMPUTED, "bars": memory_bars(e), "phases": phases(e), "size": size, "share": share,
        "duration": duration, "counted": counted, "sites": sites(e), "layers": layer_rows(e),
    }  # fmt: skip
    if "decode" in e.graphs:
        step = e.step()
        data.update(
            step=step, full_step=e.full_step(), break_even=e.break_even(), alternatives=e.compare(),
            costs=[(s, op, n, cost_cells(c), duration(t), b) for s, op, n, c, t, b in by_op(e.roofline())],
            all_cost=cost_cells(e.step_cost()), timeline=timeline(e), launches=e.roofline(),
            step_times=tables.step_time_rows(e), step_time_headers=tables.STEP_TIME_HEADERS,
            step_time_note=tables.step_time_note(e) if e.computed_steps else "",
        )  # fmt: skip
    return data


def sites(e: Figures) -> list[tuple[Any, ...]]:
    return grouped((s.model_layer, (s.query_heads, s.heads, s.head_dim, s.softcap or "-")) for s in e.sites)


def layer_rows(e: Figures) -> list[tuple[Any, ...]]:
    """Bytes of each tier for each layer; layers that are alike share a row."""
    pairs = zip(e.sites, e.bytes_by_layer, strict=True)
    return grouped((site.model_layer, tuple(map(size, tiers.values()))) for site, tiers in pairs)


def memory_bars(e: Figures) -> list[tuple[str, int, list[Part]]]:
    """Device and host memory with specache, and the device memory of a full cache, on one scale."""
    tiers = e.bytes_by_tier
    weights = {"weights": e.weight_bytes}
    bars = {
        "device, specache": {**weights, **{tier: b for tier, b in tiers.items() if tier != "host"}},
        "host, specache": {"host": tiers.get("host", 0)},
        "device, full 16-bit cache": {**weights, "full cache": e.full_cache_bytes},
    }
    longest = max(1, *(sum(parts.values()) for parts in bars.values()))
    return [
        (title, sum(parts.values()), [Part(tier, b, 100 * b / longest) for tier, b in parts.items() if b])
        for title, parts in bars.items()
    ]


def timeline(e: Figures) -> dict[str, Any]:
    """One step of a running generation: the launches of both streams, the critical path, and a time axis."""
    schedule = Schedule(e.launches, e.seconds_at(e.load()), STEADY)
    times, path = schedule.times(), set(schedule.critical_path())
    compute = [key for key in times if schedule.dag.nodes[key]["stream"] == "compute"]
    begin = max(times[key][1] for key in compute if key[0] == STEADY - 2)
    end = max(times[key][1] for key in compute)
    scale = TIMELINE_WIDTH / max(end - begin, 1e-12)
    bars = []
    for key, (start, stop) in times.items():
        data = schedule.dag.nodes[key]
        left, right = max(start, begin), min(stop, end)
        if right <= left:
            continue
        lane = ("compute", "copy").index(data["stream"])
        label = f"{data['op']}, layer {data['layer']}, {duration(stop - start)}"
        x, y, width = (left - begin) * scale, 22 + lane * (LANE_HEIGHT + 14), max((right - left) * scale, 0.3)
        mark = ", on the critical path" if key in path else ""
        bars.append(Bar(x, y, width, data["op"], key in path, label + mark))
    bars.sort(key=lambda bar: (bar.y, bar.x))
    ticks = [(i * TIMELINE_WIDTH / 8, duration((end - begin) * i / 8)) for i in range(9)]
    return {"bars": bars, "ticks": ticks, "width": TIMELINE_WIDTH, "lane": LANE_HEIGHT,
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
