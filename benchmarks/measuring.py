"""What benchmarks share: a clock, the device's limits, and where a figure comes from."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import triton


def milliseconds(
    run: Callable[[int], object], device: torch.device, repeats: int, before: Callable[[int], object] = lambda i: None
) -> float:
    """The median time of `run(i)`, by CUDA events, or by the host's clock where there is no GPU.

    `before(i)` is not timed. Callers hand out different inputs for different i, so that the L2 cache does not answer.
    """
    if device.type != "cuda":  # a smoke run, whose figures mean nothing: it needs no warm-up
        return 1e3 * statistics.median(host_seconds(run, before, i) for i in range(repeats))
    for i in range(3):
        before(i)
        run(i)
    pairs = []
    for i in range(repeats):
        before(i)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(i)
        stop.record()
        pairs.append((start, stop))
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(stop) for start, stop in pairs)


def host_seconds(run: Callable[[int], object], before: Callable[[int], object], i: int) -> float:
    before(i)
    start = time.perf_counter()
    run(i)
    return time.perf_counter() - start


def limits(device: torch.device, size: int, repeats: int) -> dict[str, float]:
    """GB/s of a copy of `size` bytes within the device (reads and writes counted), and to and from pinned memory."""
    pinned = device.type == "cuda"
    here, there = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.ones(size, dtype=torch.uint8, pin_memory=pinned)
    times = {
        "copy": milliseconds(lambda i: there.copy_(here), device, repeats) / 2,
        "to device": milliseconds(lambda i: here.copy_(host, non_blocking=True), device, repeats),
        "to host": milliseconds(lambda i: host.copy_(here, non_blocking=True), device, repeats),
    }
    return {name: size / ms / 1e6 for name, ms in times.items()}


def provenance(device: torch.device, script: str) -> dict[str, Any]:
    """The command, the day, the device, the host's threads and the versions behind a file of results."""
    return {
        "command": shlex.join(["python", script, *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "triton": triton.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
    }  # fmt: skip


def processor() -> str:
    """Its model, as Linux tells it; elsewhere its kind."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.processor() or f"{platform.machine()} CPU"


class Results:
    """The rows of one file of results, which is written anew with each of them: a run may end anywhere.

    `resume`: go on with what the file has. SystemExit where that was measured on another device, with other versions of
    what decides, or under other `settings`: such rows do not belong into one table.
    """

    def __init__(self, out: Path, script: str, device: torch.device, resume: bool, **settings: Any) -> None:
        self.out = out
        self.report: dict[str, Any] = {"provenance": provenance(device, script), "settings": settings, "rows": []}
        if resume and out.exists():
            found = json.loads(out.read_text())
            old, new = ({**report["settings"], **report["provenance"]} for report in (found, self.report))
            other = [f"{name} {old[name]}, not {new[name]}" for name in (*SAME, *settings) if old[name] != new[name]]
            if other:
                raise SystemExit(f"{out} was measured with {'; '.join(other)}: give another --out")
            self.report = found

    @property
    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.report["rows"]
        return rows

    def has(self, **key: Any) -> bool:
        """Whether there is a row with these figures."""
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.rows)

    def add(self, *rows: dict[str, Any]) -> None:
        self.rows.extend(rows)
        self.write()

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """A fact of the whole file: what it has, or else what `make` gives."""
        if name not in self.report:
            self.report[name] = make()
        return self.report[name]

    def write(self) -> None:
        """By way of another file: who is killed meanwhile leaves the old one."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        part = self.out.with_suffix(".part")
        part.write_text(json.dumps(self.report, indent=1) + "\n")
        part.replace(self.out)


# Of a provenance, what rows of one table have in common.
SAME = ("device", "torch", "cuda", "triton", "transformers")
