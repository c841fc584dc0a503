"""Timelines in Chrome's trace format, which Perfetto opens: the predicted one, and a measured one beside it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from specache_compile.errors import SpecacheError

from .figures import Figures
from .times.op_launches import STREAMS

PREDICTED = 1


def predicted_events(e: Figures) -> list[dict[str, Any]]:
    """One decode step, time in µs. A flow arrow leads from each launch to the launches on other streams that wait for
    it."""
    spans = {span.kernel.name: span for span in e.spans}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": PREDICTED, "name": "process_name",
         "args": {"name": f"predicted: computed for {e.device.name}, not measured"}},
        *({"ph": "M", "pid": PREDICTED, "tid": i, "name": "thread_name", "args": {"name": s}}
          for i, s in enumerate(STREAMS)),
    ]  # fmt: skip
    arrows = 0
    for name, span in spans.items():
        kernel = span.kernel
        events.append(
            {"ph": "X", "pid": PREDICTED, "tid": STREAMS.index(kernel.stream), "name": kernel.op, "cat": "predicted",
             "ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6,
             "args": {"launch": name, "layer": kernel.layer, "bound": span.bound, "flops": kernel.flops,
                      "hbm_bytes": kernel.memory, "pcie_bytes": kernel.to_device + kernel.to_host}}
        )  # fmt: skip
        for before in (spans[wait] for wait in kernel.waits):
            common = {"pid": PREDICTED, "name": "waits", "cat": "wait", "id": arrows}
            begin, end = STREAMS.index(before.kernel.stream), STREAMS.index(kernel.stream)
            events.append({**common, "ph": "s", "tid": begin, "ts": before.end * 1e6})
            events.append({**common, "ph": "f", "bp": "e", "tid": end, "ts": span.start * 1e6})
            arrows += 1
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
    """Write the predicted timeline, and beside it the measured one as further processes.

    Raises:
        SpecacheError: no step's time is computed.
    """
    e.check_timed()
    events = predicted_events(e)
    if profile is not None:
        measured = measured_events(profile)
        begin = min((event["ts"] for event in measured if event.get("ph") == "X"), default=0)
        for event in measured:
            if "ts" in event:
                event["ts"] -= begin  # a profiler counts from the epoch: both timelines begin at 0
        events += measured
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
