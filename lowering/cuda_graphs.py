"""Capture a session's whole decode step as a CUDA graph and replay it: one launch instead of hundreds.

Inductor's graph trees refuse graphs that write to other graphs' inputs or have inputs in host memory; a rewritten step
does both. This module can capture it: state tensors keep their addresses until the bucket grows, and the device reads
every length. `row_buckets.py` handles batches whose rows join and leave.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import free_symbols

from specache_compile.kernels.movement import copy_stream
from specache_compile.kernels.op import op_of
from specache_compile.passes.plan import RewritePlan
from specache_compile.passes.reading.nodes import value_of

from .fold_layers import Lowered

MODES = ("reduce-overhead", "max-autotune")
# Inductor's own CUDA graphs would split the step into pieces.
NO_TREES = {"triton.cudagraphs": False}
# Arguments up to this size are copied for each replay. Larger ones, and parameters, must keep their addresses.
COPIED_BYTES = 1 << 20
# Recaptures in a row after an input moved: a weight moves once, a caller's tensor in every step.
RECAPTURES = 2


def captures_on(device: torch.device) -> bool:
    """Return whether a device has CUDA graphs."""
    return device.type == "cuda"


def reason_not_to_capture(graph_module: GraphModule, plan: RewritePlan) -> str | None:
    """Return the reason why a rewritten decode step cannot be captured, or None."""
    for node in graph_module.graph.nodes:
        op = op_of(node.target)
        if op is not None and not op.capturable:
            return f"{node.target} reads the cache's length on the host"
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    batch = free_symbols([value_of(site.k).shape[0] for site in plan.sites])  # a session's batch size is one number
    for node, source in zip(placeholders, plan.inputs, strict=True):
        if source.source != "argument" or not node.users:
            continue  # a session's tensors change size only when they move, and moving clears the recorded steps
        value = value_of(node)
        if isinstance(value, Tensor) and value.device != plan.cursor.device:
            return f"input {node.name} is on {value.device}, and a replay would not read it again"
        if free_symbols(value.shape if isinstance(value, Tensor) else value) - batch:
            return f"input {node.name} changes its size from step to step (as a mask of more than padding does)"
    return None


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the capture stream of a device; torch's own capture stream belongs to one device."""
    return torch.cuda.Stream(device)


def record(
    step: Callable[[], Sequence[Any]], device: torch.device, memory: Any = None
) -> tuple[Callable[[], object], list[Any], Any]:
    """Record the launches of `step` on this device.

    Args:
        memory: memory pool of a live recorded step, since a pool without graphs cannot be reused; None for a new pool.

    Returns: the replay function, the outputs that each replay writes, and the memory pool.
    """
    graph = torch.cuda.CUDAGraph()
    stream = capture_stream(device)
    capturing = torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local")
    # A capture synchronizes the current device and empties its cache. A failed capture leaves its stream current.
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)), capturing:
        try:
            outputs = list(step())
        finally:  # a capture that ends with a forked stream raises an error that hides the cause
            copy_stream.join_capture(device)

    def replay() -> None:
        copy_stream.join(device)  # copies from outside the graph, such as a pre-decode's
        graph.replay()

    return replay, outputs, graph.pool()


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step.

    replay: launches the graph.
    outputs: the tensors that each replay overwrites.
    memory: memory pool, shared with other recorded steps: the next replay of any of them overwrites it.
    copied: positions of inputs → the tensors that the graph reads instead.
    addresses: positions of the other inputs → their recorded addresses.
    """

    replay: Callable[[], object]
    outputs: list[Any]
    memory: Any
    copied: dict[int, Tensor]
    addresses: dict[int, int]

    def moved(self, inputs: Sequence[Any]) -> int | None:
        """Return the position of an input whose address differs from the recorded one, or None."""
        return next((i for i, address in self.addresses.items() if inputs[i].data_ptr() != address), None)

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Replay on these inputs; returns the outputs in new memory."""
        for position, own in self.copied.items():
            own.copy_(inputs[position])
        self.replay()
        return [output.clone() if isinstance(output, Tensor) else output for output in self.outputs]


def capture(
    lowered: Lowered,
    inputs: Sequence[Any],
    stays: Sequence[bool],
    device: torch.device,
    memory: Any = None,
) -> RecordedStep:
    """Record `lowered` on these inputs.

    Args:
        stays: stays[i] is True if input i is state, or is written to, and keeps its address. Each replay copies small
            other inputs.
        memory: as in `record`.
    """
    copied: dict[int, Tensor] = {}
    addresses: dict[int, int] = {}
    for i, (value, state) in enumerate(zip(inputs, stays, strict=True)):
        if type(value) not in (Tensor, torch.nn.Parameter):
            continue  # the graph reads no number and no held tensor
        if state or isinstance(value, torch.nn.Parameter) or value.nbytes > COPIED_BYTES:
            addresses[i] = value.data_ptr()
        else:
            with torch.inference_mode(False):  # every grad and inference mode may write to the copy
                copied[i] = value.clone()
    own = [copied.get(i, value) for i, value in enumerate(inputs)]
    replay, outputs, memory = record(lambda: lowered(*own), device, memory)
    return RecordedStep(replay, outputs, memory, copied, addresses)


class RecordedSteps:
    """The recorded steps of one session, by lowered graph and cursor shape (rows, and columns with the page table).

    They must be cleared whenever the session's state moves.
    """

    def __init__(self) -> None:
        self.steps: dict[tuple[Lowered, tuple[int, ...]], RecordedStep | None] = {}
        # Captures in a row that a moved input made invalid.
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
        shape: tuple[int, ...] = (1,),
    ) -> list[Any]:
        """Run a step: the first run warms up the kernels, the second is captured, later ones are replays.

        Args:
            give_up: called with the position of an input that moved in several steps in a row. It must stop further
                runs of `lowered` here.
            shape: shape of the cursor, on which launch grids depend.
        """
        key = lowered, shape
        again, self.last = key == self.last, key
        if key not in self.steps:
            self.steps[key] = None
            return list(lowered(*inputs))
        step = self.steps[key]
        moved = step.moved(inputs) if step is not None else None
        self.recaptures = 0 if moved is None else self.recaptures + 1 if again else 1
        if moved is not None and self.recaptures > RECAPTURES:
            del self.steps[key]
            give_up(moved)
            return list(lowered(*inputs))
        if step is None or moved is not None:
            memory = next((known.memory for known in self.steps.values() if known is not None), None)
            step = self.steps[key] = capture(lowered, inputs, stays, device, memory)
        self.replays += 1
        return step(inputs)

    def clear(self) -> None:
        self.steps.clear()
