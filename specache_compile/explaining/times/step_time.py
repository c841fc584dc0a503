"""The time of a decode step, simulated: launches over three streams, one memory and one link.

    main         ... score, select ─┐  low-bit values  ┌─ exact values, merge ... select ─┐ ...      │ join
    correction                      └─ gather ─────────┘                                  │          │
    copy         the last layers' gathers of the step before ...                          └─ gather ─┘
Edges come from the traced graph (`step_kernels.py`). Costs are estimates (`op_launches.py`), with an error of 30 %.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from specache_compile.methods.field import LayerShape
from specache_compile.options import MethodOptions
from specache_compile.runtime.state import device_total, full_cache_bytes, predicted_bytes

from .devices import Device
from .op_launches import ISSUED, MAIN, SCHEDULERS, STREAMS, Kernel
from .step_kernels import Traced, kernels_of

LENGTHS = (8_192, 32_768, 131_072)
# Estimates: seconds between two replays of a step; bytes that a decode step and the driver need beside weights and
# tiers; a full cache's room over its tokens.
BETWEEN, MARGIN, SPARE = 60e-6, 2.1e9, 1.07
# The share of the selected pairs that travels ahead: with two lanes and correction (26 of 64 of SmolLM2 at 4,096
# tokens, like `workload.CORRECTED`), and without correction (an estimate).
AHEAD, AHEAD_UNCORRECTED = 26 / 64, 0.5
EXPOSED = "exposed"
# What bounds a launch, where it is not called as the amount in a `Kernel` is.
WORDS = {"flops": "arithmetic", "to_device": "PCIe", "to_host": "PCIe"}
# The parts of a launch: gap, work and tail. Its work alone takes resources.
WORK, TAIL = 1, 2


@dataclass(frozen=True)
class ComputedStep:
    """One step, in seconds.

    exposed: how long the main stream waits for fetches.
    bound: what takes most of the step: memory, instructions, arithmetic, launches, or PCIe.
    """

    seconds: float
    exposed: float
    bound: str


@dataclass
class Span:
    """A launch under way, or ended.

    needs: seconds of each resource alone.
    alone: seconds of the launch's work with nothing beside it.
    left: the remaining seconds of each part.
    start, end: seconds from the step's beginning; the gap before the launch is not in it.
    """

    kernel: Kernel
    needs: dict[str, float]
    alone: float
    left: list[float]
    start: float
    end: float = 0.0

    @property
    def part(self) -> int:
        return next((part for part, seconds in enumerate(self.left) if seconds > 0), TAIL)

    @property
    def loads(self) -> dict[str, float]:
        """The share of each resource that it takes now."""
        return {name: seconds / self.alone for name, seconds in self.needs.items()} if self.part == WORK else {}

    @property
    def bound(self) -> str:
        """What its work takes longest on; "launches" where that is less than its least time."""
        name = max(self.needs, key=self.needs.__getitem__)
        return "launches" if self.needs[name] < self.alone else WORDS.get(name, name)


def rates_of(device: Device) -> dict[str, float]:
    """What a second can do of each amount of a `Kernel`."""
    link = device.pcie_gbps * 1e9
    return {
        "memory": device.hbm_gbps * 1e9 * device.hbm_share,
        "flops": device.tflops * 1e12 * device.tflops_share,
        "instructions": device.sms * SCHEDULERS * device.ghz * 1e9 * ISSUED,
        "to_device": link,
        "to_host": link,
    }


def begun(kernel: Kernel, rates: dict[str, float], now: float) -> Span:
    needs = {name: amount / rate for name, rate in rates.items() if (amount := getattr(kernel, name))}
    alone = max(kernel.floor, *needs.values(), 0.0)
    return Span(kernel, needs or {"memory": 0.0}, alone, [kernel.gap, alone, kernel.tail], now + kernel.gap)


def simulated(kernels: Sequence[Kernel], device: Device) -> tuple[list[Span], dict[str, float]]:
    """Each launch's span, ordered by its end, and the main stream's seconds by resource, `EXPOSED` for fetches.

    A stream's launches run one after another. Launches of several streams share resources evenly: if together they need
    more of a resource than the device has, each of them slows down by that factor.
    """
    rates, now, spent = rates_of(device), 0.0, defaultdict[str, float](float)
    queues: dict[str, deque[Kernel]] = {stream: deque() for stream in STREAMS}
    for kernel in kernels:
        queues[kernel.stream].append(kernel)
    running: dict[str, Span] = {}
    ended: set[str] = set()
    spans = []
    while running or any(queues.values()):
        for stream, queue in queues.items():
            if stream not in running and queue and ended.issuperset(queue[0].waits):
                running[stream] = begun(queue.popleft(), rates, now)
        speeds = speeds_of(running)
        step = min(launch.left[launch.part] / speeds[stream] for stream, launch in running.items())
        main = running.get(MAIN)
        spent[EXPOSED if main is None else main.bound if main.part == WORK else "launches"] += step
        now += step
        for stream, launch in list(running.items()):
            left = launch.left[launch.part] - step * speeds[stream]
            launch.left[launch.part] = left if left > 1e-12 else 0.0
            if not any(launch.left):
                ended.add(launch.kernel.name)
                launch.end = now
                spans.append(running.pop(stream))
    return spans, spent


def speeds_of(running: dict[str, Span]) -> dict[str, float]:
    """Each launch's speed relative to its speed alone; a gap and a tail always have full speed."""
    loads = {stream: launch.loads for stream, launch in running.items()}

    def total(resource: str) -> float:
        return sum(load.get(resource, 0.0) for load in loads.values())

    return {stream: 1 / max([1.0, *map(total, load)]) for stream, load in loads.items()}


def computed(kernels: Sequence[Kernel], device: Device) -> ComputedStep:
    """The step that these launches make."""
    spans, spent = simulated(kernels, device)
    exposed = spent.pop(EXPOSED, 0.0)
    bounds = {**spent, "PCIe": spent.get("PCIe", 0.0) + exposed}
    return ComputedStep(spans[-1].end + BETWEEN, exposed, max(bounds, key=bounds.__getitem__))


def step_of(traced: Traced, device: Device, length: int, batch: int, full: int = 0) -> ComputedStep:
    """The method's own step, or the step on a full cache of `full` bytes an element, which it reads once.

    For a full cache, `traced` is a one-lane graph, whose products are the same.
    """
    return computed(kernels_of(traced, device, length, batch, full), device)


def share_ahead(options: MethodOptions, lanes: int) -> float:
    """The share of the selected pairs that a fetch ahead brings, where the caller gives none."""
    if not options.corrects:
        return AHEAD_UNCORRECTED
    return AHEAD if lanes > 1 else 0.0


def shapes_of(traced: Traced) -> list[LayerShape]:
    """The layers of the whole model."""
    found = list(traced.load.layers)
    return found + [found[len(found) // 2]] * ((traced.layers or len(found)) - len(found))


def largest_batch(traced: Traced, device: Device, length: int, host: float) -> tuple[int, str]:
    """The rows that fit, and the memory that limits them: "device", or "host" (of `host` bytes)."""
    row = predicted_bytes(traced.load.options, shapes_of(traced), 1, length + 1)
    on_device = (device.vram - traced.weights - MARGIN) / max(1, device_total(row))
    on_host = host / row["host"] if row["host"] else on_device
    return max(0, int(min(on_device, on_host))), "device" if on_device <= on_host else "host"


def full_cache_batch(traced: Traced, device: Device, length: int, itemsize: int = 2) -> int:
    """The rows that fit with a full cache of `itemsize` bytes an element."""
    row = full_cache_bytes(shapes_of(traced), 1, length, itemsize) * SPARE
    return max(0, int((device.vram - traced.weights - MARGIN) / row))


def break_even_context(traced: Traced, one_lane: Traced, device: Device) -> int | None:
    """The shortest context, to 64 tokens, from which a step of one row takes no longer than on a 16-bit cache.

    None: longer than the longest of `LENGTHS`.
    """

    def is_no_longer(length: int) -> bool:
        full = step_of(one_lane, device, length, 1, full=2)
        return step_of(traced, device, length, 1).seconds <= full.seconds

    high = 64
    while not is_no_longer(high):
        high *= 2
        if high > LENGTHS[-1]:
            return None
    low = high // 2
    while high - low > 64:
        middle = (low + high) // 2
        low, high = (low, middle) if is_no_longer(middle) else (middle, high)
    return high
