"""Capture a session's decode step whole as a CUDA graph, and replay it: one launch in place of hundreds.

Inductor's own graph trees cannot do it: they take no graph that writes to inputs which are not theirs, nor one with an
input in host memory, and a rewritten step is all of that. What makes an own capture easy is the same state: its tensors
keep their addresses until the bucket grows, and every length is read on the device.
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
# The step's own graph takes their place, and they would only cut it into pieces.
NO_TREES = {"triton.cudagraphs": False}
# Arguments up to this size are copied in for each replay; larger ones, and parameters, must stay where they are.
COPIED_BYTES = 1 << 20
# Steps in a row that are captured anew for an input that has moved: a weight moves once, a caller's tensor every time.
RECAPTURES = 2

Lowered = Callable[..., Sequence[Any]]


def captures_on(device: torch.device) -> bool:
    """Whether a device has graphs to capture."""
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
    batch = batch_symbols(plan)  # a session's is one number
    for node, source in zip(placeholders, plan.inputs, strict=True):
        if source.source != "argument" or not node.users:
            continue  # a session's own tensors change their sizes only as they move, and the recorded steps go then
        value = value_of(node)
        if isinstance(value, Tensor) and value.device != plan.cursor.device:
            return f"input {node.name} is on {value.device}, where a replay would not read it again"
        sizes = value.shape if isinstance(value, Tensor) else (value,)
        free = {symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}
        if free - batch:
            return f"input {node.name} changes its size from step to step (a mask that is more than padding does)"
    return None


def batch_symbols(plan: Plan) -> set[Any]:
    """The symbols in the batch size of the new keys; none where it is a number."""
    sizes = [value_of(site.k).shape[0] for site in plan.sites]
    return {symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that steps of a device are captured on; torch's own is of whichever device came first."""
    return torch.cuda.Stream(device)


def record(
    step: Callable[[], Sequence[Any]], device: torch.device, first: Sequence[Fetch]
) -> tuple[Callable[[], object], list[Any]]:
    """Record what `step` launches on this device; returns the replay, and the outputs that each replay writes.

    Of its fetches, those in `first` are made at the start, for the step before.
    """
    graph = torch.cuda.CUDAGraph()
    # A pool of its own: one that all of its graphs have left cannot be captured into again.
    capturing = torch.cuda.graph(graph, stream=capture_stream(device), capture_error_mode="thread_local")
    # What a capture waits for and empties is the current device's; one that fails leaves its stream the current one.
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)), capturing:
        try:
            with made_first(first, lambda: copy_stream.stream_of(device).record_event()):
                outputs = list(step())
        finally:  # a capture that ends with a stream still forked off raises, in place of what went wrong
            copy_stream.join_capture(device)

    def replay() -> None:
        copy_stream.join(device)  # copies from outside of the graph, as of a pre-decode
        graph.replay()

    return replay, outputs


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step. `copied` maps positions of inputs to the tensors that the graph reads in their place."""

    replay: Callable[[], object]
    outputs: list[Any]
    copied: dict[int, Tensor]
    addresses: dict[int, int]

    def moved(self, inputs: Sequence[Any]) -> int | None:
        """The position of an input that is read where it lies, and no longer lies there; None: all do."""
        return next((i for i, address in self.addresses.items() if inputs[i].data_ptr() != address), None)

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Outputs of a replay on these inputs, in memory of their own."""
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
) -> RecordedStep:
    """Record `lowered` on these inputs. `stays[i]`: input i is state, and keeps its address. Of the others, small ones
    are copied in for each replay. `first`: as for `record`."""
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
    replay, outputs = record(lambda: lowered(*own), device, first)
    return RecordedStep(replay, outputs, copied, addresses)


@torch.inference_mode(False)
def own_copy(value: Tensor) -> Tensor:
    """A copy that may be written to later, whatever mode the caller is in."""
    return value.clone()


class RecordedSteps:
    """The recorded steps of one session, by what was lowered; to be cleared whenever its state moves."""

    def __init__(self) -> None:
        self.steps: dict[Lowered, RecordedStep | None] = {}
        # Captures in a row that one input's move has made worthless.
        self.recaptures = 0
        self.replays = 0

    def run(
        self,
        lowered: Lowered,
        inputs: Sequence[Any],
        stays: Sequence[bool],
        device: torch.device,
        give_up: Callable[[int], object],
        deferred: Deferred,
    ) -> list[Any]:
        """The first step runs as it is, which warms up every kernel; the second is captured; each is replayed then.

        An input that has moved in each of several steps will go on to: `give_up` is told its position, and must see to
        it that no further step of `lowered` comes here. `deferred`: what a replay leaves to the next one.
        """
        if lowered not in self.steps:
            deferred.make()
            self.steps[lowered] = None
            return list(lowered(*inputs))
        step = self.steps[lowered]
        moved = step.moved(inputs) if step is not None else None
        self.recaptures = 0 if moved is None else self.recaptures + 1
        if moved is not None and self.recaptures > RECAPTURES:
            del self.steps[lowered]
            deferred.make()
            give_up(moved)
            return list(lowered(*inputs))
        if step is None or moved is not None:
            step = self.steps[lowered] = capture(lowered, inputs, stays, device, deferred.fetches())
        self.replays += 1
        deferred.owed = True
        return step(inputs)

    def clear(self) -> None:
        self.steps.clear()
