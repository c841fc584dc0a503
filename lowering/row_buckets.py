"""Row buckets: a step of 3 rows is recorded, and replayed, as one of 4, whose last row is dead.

    tokens [3, 1]     fill_up     [4, 1]    recorded step    logits [4, 1, V]     first_rows    [3, 1, V]
    rows = 3          ------->    4         ------------>                         --------->

A batch whose rows join and leave so meets 1, 2, 4, 8, ... rows alone. A dead row has no tokens and no pages: it reads
and writes page 0, which is nobody's, and the places of a row to come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from specache_compile.passes.plan import Plan
from specache_compile.passes.reading.in_place import memory_of, written
from specache_compile.passes.reading.nodes import output_node, value_of

# Where a session has given the rows already.
OF_THE_SESSION = ("state", "cursor")


def row_bucket(rows: int, most: int) -> int:
    """The rows that so many are filled up to: a power of two, where there are places for as many."""
    return min(1 << (rows - 1).bit_length(), most)


@dataclass(frozen=True)
class RowDims:
    """Where a graph's rows are, by position: the dimension of a tensor; None: the input is their number."""

    inputs: Mapping[int, int | None]
    outputs: Mapping[int, int]


class _NotFilled(Exception):
    """A size depends on the rows in some other way."""


def row_dims(graph_module: GraphModule, plan: Plan) -> RowDims | None:
    """The rows of a rewritten graph; None where they cannot be filled up: their number is a constant, a mask comes with
    them, another size follows from them, or the graph writes to what the caller has of them (a recurrence's state)."""
    rows = value_of(plan.sites[0].k).shape[0] if plan.sites else 1
    if not isinstance(rows, torch.SymInt):
        return None
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    try:
        inputs = {
            position: dim
            for position, (node, source) in enumerate(zip(placeholders, plan.inputs, strict=True))
            if source.source not in OF_THE_SESSION and is_read(node) and (dim := dim_of(node, rows)) != -1
        }
        outputs = {
            position: dim
            for position, node in enumerate(output_node(graph_module).args[0])  # type: ignore[arg-type]
            if isinstance(node, Node) and position not in plan.held_outputs and (dim := dim_of(node, rows)) != -1
        }
    except _NotFilled:
        return None
    own = {memory_of(placeholders[position]) for position in inputs} - {None}
    masked = any(source.source == "padding" for source in plan.inputs)
    if masked or None in outputs.values() or any(written(node)[1] in own for node in graph_module.graph.nodes):
        return None
    return RowDims(inputs, {position: dim for position, dim in outputs.items() if dim is not None})


def is_read(node: Node) -> bool:
    """A number may be read where a size is asked for, though no node has it."""
    return bool(node.users) or isinstance(value_of(node), torch.SymInt)


def dim_of(node: Node, rows: torch.SymInt) -> int | None:
    """The dimension of a node's value that is the rows; None: the value is their number; -1: it has none."""
    value = value_of(node)
    if not isinstance(value, Tensor | torch.SymInt):
        return -1
    symbols = rows.node.expr.free_symbols
    sizes = [x.node.expr for x in ([value] if isinstance(value, torch.SymInt) else value.shape) if hasattr(x, "node")]
    following = [size for size in sizes if size.free_symbols & symbols]
    if not following:
        return -1
    if following != [rows.node.expr]:
        raise _NotFilled
    if isinstance(value, torch.SymInt):
        return None
    return next(dim for dim, x in enumerate(value.shape) if hasattr(x, "node") and x.node.expr == rows.node.expr)


def filled_up(inputs: Sequence[Any], dims: RowDims, rows: int) -> list[Any]:
    """Inputs of a step of fewer rows, with zeros for those that are dead."""
    filled = list(inputs)
    for position, dim in dims.inputs.items():
        value = filled[position]
        if dim is None:
            filled[position] = rows
            continue
        shape = list(value.shape)
        shape[dim] = rows
        filled[position] = value.new_zeros(shape)
        filled[position].narrow(dim, 0, value.shape[dim]).copy_(value)
    return filled


def first_rows(outputs: Sequence[Any], dims: RowDims, rows: int) -> list[Any]:
    """Outputs without the dead rows."""
    cut = list(outputs)
    for position, dim in dims.outputs.items():
        cut[position] = cut[position].narrow(dim, 0, rows)
    return cut
