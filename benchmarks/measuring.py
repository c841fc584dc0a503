"""The arguments, the clock and the device's limits of the GPU benchmarks."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

# On a simulated device, whose figures mean nothing either, one shows that a run can follow another.
WARM_UPS = 1 if "SIMULATED_DEVICE" in os.environ else 3


def parser_of(described: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=described, formatter_class=argparse.RawDescriptionHelpFormatter)


def parsed(
    parser: argparse.ArgumentParser, name: str, arguments: list[str] | None
) -> tuple[argparse.Namespace, torch.device]:
    """The arguments of benchmarks/NAME.py, with those that all GPU benchmarks have, and the device."""
    parser.add_argument("--smoke", action="store_true", help="tiny, to see that everything runs")
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out has, and go on")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / f"{name}.json")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not args.smoke:
        parser.error("no CUDA device: only --smoke runs here")
    return args, torch.device("cuda" if torch.cuda.is_available() else "cpu")


def milliseconds(
    run: Callable[[int], object], device: torch.device, repeats: int, before: Callable[[int], object] = lambda i: None
) -> float:
    """The median time of `run(i)`, by CUDA events, or by the host's clock where there is no GPU.

    `before(i)` is not timed. Callers hand out different inputs for different i, so that the L2 cache does not answer.
    """
    if device.type != "cuda":  # a smoke run, whose figures mean nothing: it needs no warm-up
        return 1e3 * statistics.median(host_seconds(run, before, i) for i in range(repeats))
    for i in range(WARM_UPS):
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
