"""Timelines in Chrome's trace format, which Perfetto opens: the predicted one, and a measured one beside it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from specache_compile.errors import SpecacheError

from .figures import Figures

PREDICTED, STREAMS = 1, ("compute", "copy")


def predicted_events(e: Figures) -> list[dict[str, Any]]:
    """Two consecutive decode steps, time in µs. A flow arrow leads from each fetch to the wait that it ends."""
    schedule = e.schedule()
    times = schedule.times()
    path = set(schedule.critical_path(times))
    costs = {row.name: row for row in e.roofline()}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": PREDICTED, "name": "process_name",
         "args": {"name": f"predicted: computed for {e.device.name}, not measured"}},
        *({"ph": "M", "pid": PREDICTED, "tid": i, "name": "thread_name", "args": {"name": s}}
          for i, s in enumerate(STREAMS)),
    ]  # fmt: skip
    for key, (start, end) in times.items():
        data = schedule.dag.nodes[key]
        cost = costs[key[1]].cost
        events.append(
            {"ph": "X", "pid": PREDICTED, "tid": STREAMS.index(data["stream"]), "name": data["op"], "cat": "predicted",
             "ts": start * 1e6, "dur": (end - start) * 1e6,
             "args": {"launch": key[1], "step": key[0], "layer": data["layer"], "critical": key in path,
                      "bound": costs[key[1]].bound, "flops": cost.flops, "hbm_bytes": cost.hbm,
                      "pcie_bytes": cost.to_device + cost.to_host}}
        )  # fmt: skip
    waits = ((a, b) for a, b, kind in schedule.dag.edges(data="kind") if kind == "wait")
    for number, (fetch, wait) in enumerate(waits):
        common = {"pid": PREDICTED, "name": "fetched", "cat": "wait", "id": number}
        events.append({**common, "ph": "s", "tid": 1, "ts": times[fetch][1] * 1e6})
        events.append({**common, "ph": "f", "bp": "e", "tid": 0, "ts": times[wait][0] * 1e6})
    return events


def measured_events(profile: Any) -> list[dict[str, Any]]:
    """The events of a finished `torch.profiler.profile`, or of the trace at a path that one exported."""
    if isinstance(profile, (str, Path)):
        return list(json.loads(Path(profile).read_text())["traceEvents"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.json"
        try:
            profile.export_chrome_trace(str(path))
        except (AttributeError, AssertionError, RuntimeError) as error:
            raise SpecacheError(f"profile={profile!r}: give a torch.profiler.profile that has ended") from error
        return list(json.loads(path.read_text())["traceEvents"])


def write_trace(e: Figures, path: Path, profile: Any = None) -> None:
    """Write the predicted timeline, and beside it the measured one as further processes."""
    events = predicted_events(e)
    if profile is not None:
        measured = measured_events(profile)
        begin = min((event["ts"] for event in measured if event.get("ph") == "X"), default=0)
        for event in measured:
            if "ts" in event:
                event["ts"] -= begin  # a profiler counts from the epoch: both timelines begin at 0
        events += measured
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
