"""Row buckets: a step of 3 rows is recorded and replayed as a step of 4 rows, of which the last is a padding row.

    tokens [3, 1]  ── filled_up ──>  [4, 1]  ── recorded step ──>  logits [4, 1, V]  ── first_rows ──>  [3, 1, V]

A batch whose rows join and leave then records only steps of 1, 2, 4, 8, ... rows. A padding row has no tokens and no
pages: it reads and writes page 0, the null page, and the row state of a future row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from specache_compile.passes.plan import RewritePlan
from specache_compile.passes.reading.in_place import written_inputs
from specache_compile.passes.reading.nodes import output_node, value_of

# Inputs for which the session provides the padding rows.
OF_THE_SESSION = ("state", "cursor")


def row_bucket(rows: int, most: int) -> int:
    """Return the number of rows after padding: the next power of two, at most `most`."""
    return min(1 << (rows - 1).bit_length(), most)


@dataclass(frozen=True)
class RowDims:
    """The dimensions of a graph's rows.

    inputs, outputs: position → dimension of the rows in a tensor; an input that is no tensor is the number of rows.
    number: the symbol of the number of rows.
    assumed: Dynamo's assumptions about this symbol, under which the graph is valid.
    """

    inputs: Mapping[int, int]
    outputs: Mapping[int, int]
    number: sympy.Symbol
    assumed: tuple[sympy.Basic, ...]


def row_dims(graph_module: GraphModule, plan: RewritePlan) -> RowDims | None:
    """Return the dimensions of the rows in a rewritten graph; None if rows cannot be padded.

    Rows with a mask, and a constant number of rows, cannot be padded. The same holds if another size depends on the
    number of rows, or if the graph writes to the caller's rows (a recurrence's state).
    """
    rows: Any = value_of(plan.sites[0].k).shape[0] if plan.sites else 1
    number = rows.node.expr if isinstance(rows, torch.SymInt) else None
    if not isinstance(number, sympy.Symbol):
        return None
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    given = {
        position: node
        for position, (node, source) in enumerate(zip(placeholders, plan.inputs, strict=True))
        # A size may be read without a user.
        if source.source not in OF_THE_SESSION and (node.users or isinstance(value_of(node), torch.SymInt))
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


def sizes_by_rows(node: Node, number: sympy.Symbol) -> dict[int, sympy.Basic]:
    """Return the sizes of a node's value that depend on the number of rows, by dimension; a symbol is dimension 0."""
    value = value_of(node)
    sizes = [value] if isinstance(value, torch.SymInt) else value.shape if isinstance(value, Tensor) else ()
    known = {dim: size.node.expr for dim, size in enumerate(sizes) if isinstance(size, torch.SymInt)}
    return {dim: size for dim, size in known.items() if number in size.free_symbols}


def has_rows_in_one_dim(node: Node, number: sympy.Symbol) -> bool:
    """Return whether at most one dimension depends on the number of rows, and equals it."""
    return list(sizes_by_rows(node, number).values()) in ([], [number])


def filled_up(inputs: Sequence[Any], dims: RowDims, live: int, rows: int) -> list[Any]:
    """Extend a step's inputs from `live` rows to `rows` rows, with zeros for the padding rows."""
    filled = list(inputs)
    for position, dim in dims.inputs.items() if live < rows else ():
        value = filled[position]
        filled[position] = with_zeros(value, dim, rows) if isinstance(value, Tensor) else rows
    return filled


def with_zeros(value: Tensor, dim: int, rows: int) -> Tensor:
    missing = list(value.shape)
    missing[dim] = rows - value.shape[dim]
    return torch.cat([value, value.new_zeros(missing)], dim)


def first_rows(outputs: Sequence[Any], dims: RowDims, rows: int) -> list[Any]:
    """Return the outputs without the padding rows."""
    cut = list(outputs)
    for position, dim in dims.outputs.items():
        cut[position] = cut[position].narrow(dim, 0, rows)
    return cut
