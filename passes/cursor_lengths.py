"""Read the number of cached tokens from the cursor, where a recorded step must look for it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from specache_compile.kernels.state.cursor import LENGTH

from .plan import PassReport, Plan, cursor_input
from .reading.nodes import value_of


def cursor_lengths(graph_module: GraphModule, plan: Plan) -> tuple[GraphModule, PassReport]:
    """Positions that a decode graph counts from its cache's length count from the longest row's in the cursor instead.

        position = arange(1) + s53         position = arange(1) + cursor[:, 0].amax()

    A symbol that grows from step to step would keep the step from being captured; the cursor is a tensor that stays
    where it is. Only a model that is called without `position_ids` has such positions.
    """
    found = 0
    past = past_of(plan)
    if past is None:
        return graph_module, PassReport("cursor_lengths", {"read": 0})
    for node in list(graph_module.graph.nodes):
        length = counted_from(node, past)
        if length is None:
            continue
        plan.counts_positions = True
        if not plan.phase.one_token:
            continue
        cursor = cursor_input(graph_module, plan)
        with graph_module.graph.inserting_before(node):
            rows = graph_module.graph.call_function(operator.getitem, (cursor, (slice(None), LENGTH)))
            read = graph_module.graph.call_function(torch.amax, (rows, 0))
        rows.meta["example_value"] = plan.cursor[:, LENGTH]
        read.meta["example_value"] = rows.meta["example_value"].amax(0)
        node.replace_input_with(length, read)
        found += 1
    return graph_module, PassReport("cursor_lengths", {"read": found})


def past_of(plan: Plan) -> Any:
    """The symbol of the cached tokens' number; None where there is none."""
    past = plan.sites[0].past_k if plan.sites else None
    size = None if past is None else value_of(past).shape[2]
    return size.node.expr if isinstance(size, torch.SymInt) else None


def counted_from(node: Node, past: Any) -> Node | None:
    """Of `integers + past`, the node of `past`."""
    if node.target not in (operator.add, torch.add, "add") or len(node.args) != 2:
        return None
    first, second = node.args
    if not (isinstance(first, Node) and isinstance(second, Node)):
        return None
    counted, length = value_of(first), value_of(second)
    is_count = isinstance(counted, Tensor) and counted.dtype == torch.int64
    return second if is_count and isinstance(length, torch.SymInt) and length.node.expr == past else None
