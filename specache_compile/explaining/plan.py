"""Sums over a plan: memory by layer, the batch that fits, the step's time, the context from which specache pays off.

All are computed from shapes and data sheets, never measured. Times are floors (see `roofline.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule, Node

from specache_compile.kernels.costs import bytes_of
from specache_compile.methods.field import LayerShape
from specache_compile.options import MethodOptions
from specache_compile.passes.reading.nodes import value_of
from specache_compile.runtime.state import device_total, predicted_bytes

from .schedule import Key, Launch, Schedule
from .times.devices import Device
from .times.roofline import operator_name

LONGEST = 1 << 20  # tokens: where the search for a break-even context gives up
STEADY = 4  # steps after which a simulated step repeats itself
VIEWS = {
    "_unsafe_view", "alias", "detach", "expand", "flatten", "getitem", "permute", "reshape", "select", "slice",
    "squeeze", "t", "transpose", "unflatten", "unsqueeze", "view",
}  # fmt: skip


def largest_batch(
    options: MethodOptions,
    layers: Sequence[LayerShape],
    length: int,
    fixed: int,
    per_row: int,
    vram: float,
    host: float,
) -> int:
    """The most rows for which weights (`fixed` bytes), a row's temporaries (`per_row`) and the tiers fit into `vram`
    and `host` bytes."""
    row = predicted_bytes(options, list(layers), 1, length)
    on_device, on_host = device_total(row) + per_row, row.get("host", 0)
    fits = min((vram - fixed) / max(1, on_device), host / max(1, on_host))
    return max(0, int(fits))


def temporaries(graph_module: GraphModule) -> int:
    """The most bytes of a graph's own tensors alive at once, in the graph's order and with nothing fused."""
    nodes = list(graph_module.graph.nodes)
    owner: dict[Node, Node] = {}
    last: dict[Node, int] = {}
    for place, node in enumerate(nodes):
        inputs = node.all_input_nodes
        owner[node] = owner[inputs[0]] if inputs and operator_name(node) in VIEWS else node
        for used in inputs:
            last[owner[used]] = place
    dying: dict[int, list[Node]] = {}
    for node, place in last.items():
        dying.setdefault(place, []).append(node)
    alive = most = 0
    for place, node in enumerate(nodes):
        if owner[node] is node:
            alive += own_bytes(node)
        most = max(most, alive)
        alive -= sum(own_bytes(dead) for dead in dying.get(place, ()))
    return most


def own_bytes(node: Node) -> int:
    """Bytes that a node allocates; 0 for the graph's inputs."""
    if node.op in ("placeholder", "output", "get_attr"):
        return 0
    value = value_of(node)
    parts = value if isinstance(value, (list, tuple)) else [value]
    return sum(bytes_of(part) for part in parts if isinstance(part, Tensor))


@dataclass(frozen=True)
class StepTime:
    """One decode step of a running generation, in seconds.

    compute, copy: how long each stream is busy.
    waited: how long compute waits for fetches.
    hidden: share of the fetches' time that no wait sees; None where nothing is fetched.
    critical_path: its launches within this step's time, with fetches that the step before began.
    """

    seconds: float
    compute: float
    copy: float
    waited: float
    hidden: float | None
    critical_path: tuple[Key, ...]


def step_time(launches: list[Launch], seconds: Mapping[str, float]) -> StepTime:
    """Simulate a few steps, and report the last of them."""
    schedule = Schedule(launches, seconds, STEADY)
    times = schedule.times()
    ends = [max(end for (step, _), (_, end) in times.items() if step == n) for n in (STEADY - 2, STEADY - 1)]
    last = [(key, schedule.dag.nodes[key]) for key in times if key[0] == STEADY - 1]
    compute_ends = {
        n: max(times[k][1] for k in times if k[0] == n and schedule.dag.nodes[k]["stream"] == "compute")
        for n in (STEADY - 2, STEADY - 1)
    }
    waited = 0.0
    for key, data in last:
        if data["op"] == "wait":
            ready = [
                times[before][1]
                for before in schedule.dag.predecessors(key)
                if schedule.dag.nodes[before]["stream"] == "compute"
            ]
            waited += max(0.0, times[key][0] - max(ready, default=times[key][0]))
    busy = {s: sum(seconds.get(x.name, 0.0) for x in launches if x.stream == s) for s in ("compute", "copy")}
    fetch = sum(seconds.get(x.name, 0.0) for x in launches if x.op == "prefetch")
    # Copies may go on behind a step's last computation; the time between two last computations is what repeats.
    period = max(compute_ends[STEADY - 1] - compute_ends[STEADY - 2], 0.0) or ends[1] - ends[0]
    return StepTime(
        period, busy["compute"], busy["copy"], waited,
        hidden=max(0.0, 1 - waited / fetch) if fetch else None,
        critical_path=tuple(k for k in schedule.critical_path(times) if times[k][1] > compute_ends[STEADY - 2]),
    )  # fmt: skip


def break_even(
    ours: Callable[[int], float], full: Callable[[int], float], least: int = 64, most: int = LONGEST
) -> int | None:
    """The shortest context, to 64 tokens, at which our step takes no longer than the full cache's; None where there is
    none up to `most` tokens, `least` times a power of two."""
    high = least
    while ours(high) > full(high):
        high *= 2
        if high > most:
            return None
    low = high // 2
    while high - low > 64:
        middle = (low + high) // 2
        low, high = (low, middle) if ours(middle) <= full(middle) else (middle, high)
    return high


def fits(device: Device) -> float:
    """A device's memory in bytes."""
    return device.vram_gib * 2**30
