"""Capture a session's whole decode step as a CUDA graph and replay it: one launch in place of hundreds.

Inductor's graph trees cannot do this. They refuse graphs that write to inputs of others or have inputs in host memory,
and a rewritten step does both. A capture of our own is easy: the state's tensors keep their addresses until the bucket
grows, and every length is read on the device. Rows of a batch that come and go are `row_buckets.py`'s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from specache_compile.kernels.movement import copy_stream
from specache_compile.kernels.movement.deferred import Deferred, Fetch, made_first
from specache_compile.kernels.op import op_of
from specache_compile.passes.plan import Plan
from specache_compile.passes.reading.nodes import value_of

MODES = ("reduce-overhead", "max-autotune")
# The step's own graph replaces Inductor's trees, which would only cut the step into pieces.
NO_TREES = {"triton.cudagraphs": False}
# Arguments up to this size are copied for each replay. Larger ones, and parameters, must keep their addresses.
COPIED_BYTES = 1 << 20
# How many steps in a row are captured anew for a moved input: a weight moves once, a caller's tensor every time.
RECAPTURES = 2

Lowered = Callable[..., Sequence[Any]]


def captures_on(device: torch.device) -> bool:
    """Whether a device has CUDA graphs."""
    return device.type == "cuda"


def reason_not_to_capture(graph_module: GraphModule, plan: Plan) -> str | None:
    """Why a rewritten decode step cannot be captured; None where it can."""
    if plan.hit_rate:
        return "the hit rate is measured"
    for node in graph_module.graph.nodes:
        op = op_of(node.target)
        if op is not None and not op.capturable:
            return f"{node.target} reads the cache's length on the host"
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    batch = batch_symbols(plan)  # a session's batch size is one number
    for node, source in zip(placeholders, plan.inputs, strict=True):
        if source.source != "argument" or not node.users:
            continue  # a session's tensors change size only when they move, which drops the recorded steps
        value = value_of(node)
        if isinstance(value, Tensor) and value.device != plan.cursor.device:
            return f"input {node.name} is on {value.device}, and a replay would not read it again"
        sizes = value.shape if isinstance(value, Tensor) else (value,)
        free = {symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}
        if free - batch:
            return f"input {node.name} changes its size from step to step (as a mask of more than padding does)"
    return None


def batch_symbols(plan: Plan) -> set[Any]:
    """The symbols in the new keys' batch size; none where it is a number."""
    sizes = [value_of(site.k).shape[0] for site in plan.sites]
    return {symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that captures a device's steps; torch's own belongs to the device that came first."""
    return torch.cuda.Stream(device)


def record(
    step: Callable[[], Sequence[Any]], device: torch.device, first: Sequence[Fetch], memory: Any = None
) -> tuple[Callable[[], object], list[Any], Any]:
    """Record the launches of `step` on this device; returns the replay, the outputs that each replay writes, and the
    memory pool that it works in.

    first: its fetches that are made at the start, for the step before.
    memory: the pool of a recorded step that there still is, since one without any cannot be captured into again; None:
        a new one.
    """
    graph = torch.cuda.CUDAGraph()
    stream = capture_stream(device)
    capturing = torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local")
    # A capture synchronizes the current device and empties its cache. A failed capture leaves its stream current.
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)), capturing:
        try:
            with made_first(first, lambda: copy_stream.stream_of(device).record_event()):
                outputs = list(step())
        finally:  # a capture that ends with a forked stream raises and hides what went wrong
            copy_stream.join_capture(device)

    def replay() -> None:
        copy_stream.join(device)  # copies from outside the graph, such as a pre-decode's
        graph.replay()

    return replay, outputs, graph.pool()


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step.

    copied: maps positions of inputs to the tensors that the graph reads in their place.
    memory: the pool that it works in, with others: what a replay leaves there is another's from the next one on.
    """

    replay: Callable[[], object]
    outputs: list[Any]
    memory: Any
    copied: dict[int, Tensor]
    addresses: dict[int, int]

    def moved(self, inputs: Sequence[Any]) -> int | None:
        """The position of an input whose address is recorded and has changed; None: there is none."""
        return next((i for i, address in self.addresses.items() if inputs[i].data_ptr() != address), None)

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of a replay on these inputs, in new memory."""
        for position, own in self.copied.items():
            own.copy_(inputs[position])
        self.replay()
        return [output.clone() if isinstance(output, Tensor) else output for output in self.outputs]


def capture(
    lowered: Lowered,
    inputs: Sequence[Any],
    stays: Sequence[bool],
    device: torch.device,
    first: Sequence[Fetch] = (),
    memory: Any = None,
) -> RecordedStep:
    """Record `lowered` on these inputs.

    stays: stays[i]: input i is state, or written to, and keeps its address. Small other inputs are copied for each
        replay.
    first, memory: as for `record`.
    """
    copied: dict[int, Tensor] = {}
    addresses: dict[int, int] = {}
    for i, (value, state) in enumerate(zip(inputs, stays, strict=True)):
        if type(value) not in (Tensor, torch.nn.Parameter):
            continue  # a number or a held tensor: nothing in the graph reads it
        if state or isinstance(value, torch.nn.Parameter) or value.nbytes > COPIED_BYTES:
            addresses[i] = value.data_ptr()
        else:
            copied[i] = own_copy(value)
    own = [copied.get(i, value) for i, value in enumerate(inputs)]
    replay, outputs, memory = record(lambda: lowered(*own), device, first, memory)
    return RecordedStep(replay, outputs, memory, copied, addresses)


@torch.inference_mode(False)
def own_copy(value: Tensor) -> Tensor:
    """A copy that can be written to later, in any mode of the caller."""
    return value.clone()


class RecordedSteps:
    """The recorded steps of one session, by lowered graph and its cursor's shape: rows, and pages of the longest. Clear
    them whenever its state moves."""

    def __init__(self) -> None:
        self.steps: dict[tuple[Lowered, tuple[int, ...]], RecordedStep | None] = {}
        # Captures in a row that one graph lost to a moving input.
        self.recaptures = 0
        self.last: tuple[Lowered, tuple[int, ...]] | None = None
        self.replays = 0

    def run(
        self,
        lowered: Lowered,
        inputs: Sequence[Any],
        stays: Sequence[bool],
        device: torch.device,
        give_up: Callable[[int], object],
        deferred: Deferred,
        shape: tuple[int, ...] = (1,),
    ) -> list[Any]:
        """Run a step: the first as it is, to warm up every kernel; the second is captured; later ones are replayed.

        give_up: called with the position of an input that has moved in several steps in a row, and will again. It must
            see to it that no further step of `lowered` comes here.
        deferred: the fetches that a replay leaves to the next one.
        shape: the cursor's, which grids follow.
        """
        key = lowered, shape
        again, self.last = key == self.last, key
        if key not in self.steps:
            deferred.make()
            self.steps[key] = None
            return list(lowered(*inputs))
        step = self.steps[key]
        moved = step.moved(inputs) if step is not None else None
        self.recaptures = 0 if moved is None else self.recaptures + 1 if again else 1
        if moved is not None and self.recaptures > RECAPTURES:
            del self.steps[key]
            deferred.make()
            give_up(moved)
            return list(lowered(*inputs))
        if step is None or moved is not None:
            memory = next((known.memory for known in self.steps.values() if known is not None), None)
            step = self.steps[key] = capture(lowered, inputs, stays, device, deferred.fetches(shape[0]), memory)
        self.replays += 1
        deferred.owed = True
        return step(inputs)

    def clear(self) -> None:
        self.steps.clear()
