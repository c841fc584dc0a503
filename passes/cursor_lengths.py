"""Read the number of cached tokens from the cursor, so that a recorded step stays valid."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from specache_compile.kernels.state.cursor import LENGTH

from .plan import RewritePlan, session_input
from .reading.nodes import value_of


def cursor_lengths(graph_module: GraphModule, plan: RewritePlan) -> GraphModule:
    """Replace the cache's length, from which a decode graph counts positions, by the longest length in the cursor.

        position = arange(1) + s53         position = arange(1) + cursor[:, 0].amax()

    A symbol that grows from step to step prevents capturing; the cursor is a tensor at a fixed address. Only a model
    that is called without `position_ids` has such positions.
    """
    past = past_of(plan)
    if past is None:
        return graph_module
    for node in list(graph_module.graph.nodes):
        length = counted_from(node, past)
        if length is None:
            continue
        plan.counts_positions = True
        if not plan.phase.one_token:
            continue
        cursor = session_input(graph_module, plan, "cursor")
        with graph_module.graph.inserting_before(node):
            rows = graph_module.graph.call_function(operator.getitem, (cursor, (slice(None), LENGTH)))
            read = graph_module.graph.call_function(torch.amax, (rows, 0))
        rows.meta["example_value"] = plan.cursor[:, LENGTH]
        read.meta["example_value"] = rows.meta["example_value"].amax(0)
        node.replace_input_with(length, read)
    return graph_module


def past_of(plan: RewritePlan) -> Any:
    """Return the symbol of the number of cached tokens, or None."""
    past = plan.sites[0].past_k if plan.sites else None
    size = None if past is None else value_of(past).shape[2]
    return size.node.expr if isinstance(size, torch.SymInt) else None


def counted_from(node: Node, past: Any) -> Node | None:
    """Return the node of `past` in `integers + past`; None for any other node."""
    if node.target not in (operator.add, torch.add, "add") or len(node.args) != 2:
        return None
    first, second = node.args
    if not (isinstance(first, Node) and isinstance(second, Node)):
        return None
    counted, length = value_of(first), value_of(second)
    is_count = isinstance(counted, Tensor) and counted.dtype == torch.int64
    return second if is_count and isinstance(length, torch.SymInt) and length.node.expr == past else None
