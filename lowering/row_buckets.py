"""Row buckets: a step of 3 rows is recorded, and replayed, as one of 4, whose last row is dead.

    tokens [3, 1]  ── filled_up ──>  [4, 1]  ── recorded step ──>  logits [4, 1, V]  ── first_rows ──>  [3, 1, V]

A batch whose rows join and leave so meets 1, 2, 4, 8, ... rows alone. A dead row has no tokens and no pages: it reads
and writes page 0, which is nobody's, and the places of a row to come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from specache_compile.passes.plan import Plan
from specache_compile.passes.reading.in_place import written_inputs
from specache_compile.passes.reading.nodes import output_node, value_of

# Where a session has given the rows already.
OF_THE_SESSION = ("state", "cursor")


def row_bucket(rows: int, most: int) -> int:
    """The rows that so many are filled up to: a power of two, where there are places for as many."""
    return min(1 << (rows - 1).bit_length(), most)


@dataclass(frozen=True)
class RowDims:
    """Where a graph's rows are.

    inputs, outputs: by position, the dimension of a tensor; an input that is no tensor is their number.
    number: the symbol of their number.
    assumed: what must hold of it for the graph to be right, of Dynamo's symbols.
    """

    inputs: Mapping[int, int]
    outputs: Mapping[int, int]
    number: sympy.Symbol
    assumed: tuple[sympy.Basic, ...]


def row_dims(graph_module: GraphModule, plan: Plan) -> RowDims | None:
    """The rows of a rewritten graph; None where they cannot be filled up: their number is a constant, a mask comes with
    them, another size follows from them, or the graph writes to what the caller has of them (a recurrence's state)."""
    rows: Any = value_of(plan.sites[0].k).shape[0] if plan.sites else 1
    number = rows.node.expr if isinstance(rows, torch.SymInt) else None
    if not isinstance(number, sympy.Symbol):
        return None
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    given = {
        position: node
        for position, (node, source) in enumerate(zip(placeholders, plan.inputs, strict=True))
        if source.source not in OF_THE_SESSION and is_read(node)
    }
    results: Any = enumerate(output_node(graph_module).args[0])  # type: ignore[arg-type]
    made = {
        position: node for position, node in results if isinstance(node, Node) and position not in plan.held_outputs
    }
    by_rows = {position for position, node in given.items() if sizes_by_rows(node, number)}
    if (
        any(source.source == "padding" for source in plan.inputs)
        or by_rows & written_inputs(graph_module)
        or not all(has_rows_in_one_dim(node, number) for node in (*given.values(), *made.values()))
        or not all(isinstance(value_of(node), Tensor) for node in made.values())
    ):
        return None
    inputs, outputs = (
        {position: next(iter(sizes)) for position, node in nodes.items() if (sizes := sizes_by_rows(node, number))}
        for nodes in (given, made)
    )
    assumed = [rows.node.shape_env.replace(guard.expr) for guard in rows.node.shape_env.guards]
    return RowDims(inputs, outputs, number, tuple(dict.fromkeys(x for x in assumed if number in x.free_symbols)))


def is_read(node: Node) -> bool:
    """A number may be read where a size is asked for, though no node has it."""
    return bool(node.users) or isinstance(value_of(node), torch.SymInt)


def sizes_by_rows(node: Node, number: sympy.Symbol) -> dict[int, sympy.Basic]:
    """Of a node's value the sizes that follow from the number of rows, by dimension; the value itself, if it is one."""
    value = value_of(node)
    sizes = [value] if isinstance(value, torch.SymInt) else value.shape if isinstance(value, Tensor) else ()
    known = {dim: size.node.expr for dim, size in enumerate(sizes) if isinstance(size, torch.SymInt)}
    return {dim: size for dim, size in known.items() if number in size.free_symbols}


def has_rows_in_one_dim(node: Node, number: sympy.Symbol) -> bool:
    """Or in none."""
    return list(sizes_by_rows(node, number).values()) in ([], [number])


def filled_up(inputs: Sequence[Any], dims: RowDims, live: int, rows: int) -> list[Any]:
    """Inputs of a step of `live` rows as those of one of `rows`, with zeros for the dead ones."""
    filled = list(inputs)
    for position, dim in dims.inputs.items() if live < rows else ():
        value = filled[position]
        filled[position] = with_zeros(value, dim, rows) if isinstance(value, Tensor) else rows
    return filled


def with_zeros(value: Tensor, dim: int, rows: int) -> Tensor:
    shape = list(value.shape)
    shape[dim] = rows
    longer = value.new_zeros(shape)
    longer.narrow(dim, 0, value.shape[dim]).copy_(value)
    return longer


def first_rows(outputs: Sequence[Any], dims: RowDims, rows: int) -> list[Any]:
    """Outputs without the dead rows."""
    cut = list(outputs)
    for position, dim in dims.outputs.items():
        cut[position] = cut[position].narrow(dim, 0, rows)
    return cut
