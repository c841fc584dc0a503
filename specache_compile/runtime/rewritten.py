"""A rewritten graph as a step runs it: made in `compile/`, and handed to the runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from torch.fx import GraphModule

from specache_compile.lowering.row_buckets import RowDims
from specache_compile.passes.pipeline import Trace
from specache_compile.passes.plan import Input
from specache_compile.passes.reading.sites import Part

from .variant import Variant


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A rewritten graph and its callable.

    inputs: where each comes from at run time.
    held_outputs: output positions that are to be held tensors → site and part.
    guesses: the last output is the next guess.
    capture: a CUDA graph is to be made of the callable.
    writes: positions of inputs that it writes to; known where it is captured.
    rows: where its rows are, if others that are dead may fill them up.
    one_lane: why the graph was not widened, though it was to be.
    counts_positions: positions are counted from the cache's length in it; else the caller gives them.
    assumes: of Dynamo's symbols, what its guards do not say; each call is to be checked.
    """

    variant: Variant
    run: Callable[..., Any]
    graph_module: GraphModule
    inputs: tuple[Input, ...]
    held_outputs: Mapping[int, tuple[int, Part]]
    guesses: bool
    lanes: int
    capture: bool
    trace: Trace
    one_lane: str | None = None
    counts_positions: bool = False
    assumes: tuple[sympy.Basic, ...] = ()
    writes: frozenset[int] = frozenset()
    rows: RowDims | None = None

    @property
    def needs_guess(self) -> bool:
        """Whether it takes the speculative token as an input."""
        return Input("guess") in self.inputs
