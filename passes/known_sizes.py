"""Sizes that Dynamo took for constants, in graphs that ask for them all the same."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from .context import value_of


def fill_in_sizes(graph_module: GraphModule) -> int:
    """A size that is a number in this graph is written as that number; returns how many were.

        size = past_k.size()                 size = past_k.size()
        length = size[2] + 1                 kv = arange(41)
        kv = arange(length)

    A graph for one length alone asks the cache for it (transformers before 5.23, where the mask is made in the graph;
    dynamic=False); held tensors are not to be read, and here nothing is left that reads them.
    """
    filled = 0
    for node in list(graph_module.graph.nodes):
        number = known(node)
        if number is None:
            continue
        for user in [user for user in node.users if user.op != "output"]:
            user.args = map_arg(user.args, lambda arg, of=node, to=number: to if arg is of else arg)
            user.kwargs = map_arg(user.kwargs, lambda arg, of=node, to=number: to if arg is of else arg)
            filled += 1
        if not node.users:
            graph_module.graph.erase_node(node)
    graph_module.recompile()
    return filled


def known(node: Node) -> int | None:
    """The whole number that a call gives, whatever the inputs."""
    value: Any = value_of(node) if node.op in ("call_function", "call_method") else None
    if isinstance(value, torch.SymInt) and value.node.expr.is_Integer:
        return int(value.node.expr)
    return value if type(value) is int else None
