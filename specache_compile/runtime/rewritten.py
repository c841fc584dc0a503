"""A rewritten graph, which `compile/` builds and a step runs, and its inputs, bound once to a session's tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from specache_compile.lowering.row_buckets import RowDims
from specache_compile.methods.field import LayerState
from specache_compile.passes.plan import Input
from specache_compile.passes.reading.local_shards import local
from specache_compile.passes.reading.sites import Part

from .variant import Variant


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
    texts: Mapping[str, str]
    one_lane: str | None = None
    counts_positions: bool = False
    assumes: tuple[sympy.Basic, ...] = ()
    writes: frozenset[int] = frozenset()
    rows: RowDims | None = None

    @functools.cached_property
    def session_inputs(self) -> frozenset[str]:
        """The kinds of the session's tensors among the inputs."""
        return frozenset(source.source for source in self.inputs if source.source != "argument")

    @functools.cached_property
    def stays(self) -> list[bool]:
        """Of each input of a captured graph, whether it is state or is written to, and so keeps its address."""
        owned = [source.source in ("state", "cursor", "padding") for source in self.inputs]
        return [own or position in self.writes for position, own in enumerate(owned)]


@dataclass(frozen=True)
class BoundInputs:
    """Inputs of one rewritten graph for a session's state and cursor.

    state: another list requires a new binding, as another cursor does.
    values: the inputs; None at the places below.
    arguments: (place, position among the caller's arguments). shards: those that are DTensors.
    own: (place, name of a session's tensor that may be another one in each step).
    """

    state: list[LayerState]
    values: list[Any]
    arguments: tuple[tuple[int, int], ...]
    shards: tuple[tuple[int, int], ...]
    own: tuple[tuple[int, str], ...]

    def of_call(self, arguments: Sequence[Any], own: Mapping[str, Any]) -> list[Any]:
        """The inputs of one call, in a new list."""
        values = self.values.copy()
        for place, position in self.arguments:
            values[place] = arguments[position]
        for place, position in self.shards:
            values[place] = local(arguments[position])
        for place, name in self.own:
            values[place] = own[name]
        return values


def bind(inputs: Sequence[Input], state: list[LayerState], cursor: Tensor, arguments: Sequence[Any]) -> BoundInputs:
    """Bind a graph's inputs. arguments: of a call; Dynamo's guards keep the class of each."""
    values: list[Any] = [None] * len(inputs)
    own, given, shards = list[tuple[int, str]](), list[tuple[int, int]](), list[tuple[int, int]]()
    for place, source in enumerate(inputs):
        if source.source == "argument":
            sharded = isinstance(arguments[source.argument], DTensor)
            (shards if sharded else given).append((place, source.argument))
        elif source.source == "state":
            values[place] = state[source.site][source.field]
        elif source.source == "cursor":
            values[place] = cursor
        else:
            own.append((place, source.source))
    return BoundInputs(state, values, tuple(given), tuple(shards), tuple(own))
