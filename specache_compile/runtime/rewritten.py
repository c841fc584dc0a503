"""The variants of a captured graph, and a rewritten graph, which `compile/` builds and a step runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule

from specache_compile.lowering.row_buckets import RowDims
from specache_compile.options import MethodOptions
from specache_compile.passes.phase import Phase
from specache_compile.passes.plan import Input
from specache_compile.passes.reading.sites import Part


@dataclass(frozen=True)
class Variant:
    """A phase with a session's options.

    unpadded: of a graph with a padding mask, the variant for a mask that equals the rows' lengths.
    ragged: of a prefill, the variant for padding in front of rows, which is not stored.
    capacity: tokens of the state, if a graph serves one capacity only; None: any.
    """

    phase: Phase
    options: MethodOptions
    unpadded: bool = False
    ragged: bool = False
    capacity: int | None = None


def variant_of(
    graph: Any, phase: Phase, options: MethodOptions, front: Sequence[int] | None, arguments: Sequence[Any],
    capacity: int,
) -> Variant:  # fmt: skip
    """The variant for a call.

    graph: its `compile/captured.py: Captured`.
    front: padding in front of each row's new tokens; None: no mask, or one that hides anything else.
    capacity: tokens that the state has room for.
    """
    is_prefill = not graph.phase.has_past
    ragged = is_prefill and front is not None and any(front)
    unpadded = front is not None and not ragged
    if is_prefill and front is None and graph.padding is not None:
        # transformers before 5.18 passes a mask of ones to every prefill. Here the host waits for the device.
        mask = arguments[graph.padding]
        unpadded = isinstance(mask, FakeTensor) or bool(mask.all())
    return Variant(phase, options, unpadded, ragged, None if options.capacity_is_free else capacity)


def selects(options: MethodOptions) -> bool:
    """Whether a decode step selects pairs for the next step; not if each token selects its own and none is
    speculative."""
    return bool(options.top_k) and (options.two_lanes or not options.corrects)


def phases(phase: Phase, options: MethodOptions) -> tuple[Phase, ...]:
    """The phases that a graph captured in this phase is rewritten for."""
    return (phase.before, phase) if phase.before is not None and selects(options) else (phase,)


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A rewritten graph and its callable.

    inputs: the source of each input at run time.
    held_outputs: positions of outputs that become held tensors → site and part.
    speculates: the last output is the next speculative token.
    capture: record the callable as a CUDA graph.
    writes: positions of inputs that the graph writes to.
    rows: the dimensions of its rows, if inactive rows may pad them.
    one_lane: why the graph was not widened, although the options request it.
    counts_positions: the graph counts positions from the cache's length; else the caller passes them.
    assumes: conditions on Dynamo's symbols that its guards do not check; each call must be checked.
    """

    variant: Variant
    run: Callable[..., Any]
    graph_module: GraphModule
    inputs: tuple[Input, ...]
    held_outputs: Mapping[int, tuple[int, Part]]
    speculates: bool
    lanes: int
    capture: bool
    stages: Mapping[str, GraphModule]
    one_lane: str | None = None
    counts_positions: bool = False
    assumes: tuple[sympy.Basic, ...] = ()
    writes: frozenset[int] = frozenset()
    rows: RowDims | None = None

    @functools.cached_property
    def reads_speculative(self) -> bool:
        return any(each.source == "speculative" for each in self.inputs)

    @functools.cached_property
    def places(self) -> list[tuple[int, int | str]]:
        return [each.place for each in self.inputs]

    @functools.cached_property
    def stays(self) -> list[bool]:
        """Of each input of a captured graph, whether it is state or is written to, and so keeps its address."""
        owned = [source.source in ("state", "cursor", "padding") for source in self.inputs]
        return [own or position in self.writes for position, own in enumerate(owned)]
