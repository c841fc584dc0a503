"""Sizes that Dynamo took for constants, in graphs that ask for them all the same."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from .nodes import value_of


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
        fill = functools.partial(filled_in, node, number)
        for user in [user for user in node.users if user.op != "output"]:
            user.args, user.kwargs = map_arg(user.args, fill), map_arg(user.kwargs, fill)
            filled += 1
        if not node.users:
            graph_module.graph.erase_node(node)
    graph_module.recompile()
    return filled


def filled_in(size: Node, number: int, argument: Node) -> Node | int:
    return number if argument is size else argument


def known(node: Node) -> int | None:
    """The whole number that a call gives, whatever the inputs."""
    value: Any = value_of(node) if node.op in ("call_function", "call_method") else None
    if isinstance(value, torch.SymInt) and value.node.expr.is_Integer:
        return int(value.node.expr)
    return value if type(value) is int else None
