"""A rewritten graph, which `compile/` builds and a step runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from torch.fx import GraphModule

from specache_compile.lowering.row_buckets import RowDims
from specache_compile.passes.plan import Input
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
        """The place of each input among the caller's arguments (0), the session's other tensors (1) and the state of
        each layer (2 and more), with its key there."""
        return [
            (0, each.argument) if each.source == "argument"
            else (2 + each.site, each.field) if each.source == "state"
            else (1, each.source)
            for each in self.inputs
        ]  # fmt: skip

    @functools.cached_property
    def stays(self) -> list[bool]:
        """Of each input of a captured graph, whether it is state or is written to, and so keeps its address."""
        owned = [source.source in ("state", "cursor", "padding") for source in self.inputs]
        return [own or position in self.writes for position, own in enumerate(owned)]
