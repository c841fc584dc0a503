"""Replace sizes that are constants in a graph by their numbers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from .nodes import value_of


def fill_in_sizes(graph_module: GraphModule) -> int:
    """Replace each size that is a constant in this graph by its number; returns the number of replacements.

        size = past_k.size()                 size = past_k.size()
        length = size[2] + 1                 kv = arange(41)
        kv = arange(length)

    A graph for a single length reads it from the cache, with dynamic=False and transformers before 5.23. Held tensors
    must not be read, and this removes such reads.
    """
    filled = 0
    for node in list(graph_module.graph.nodes):
        number = known(node)
        if number is None:
            continue
        fill = functools.partial(filled_in, node, number)
        for user in [user for user in node.users if user.op != "output"]:
            user.args, user.kwargs = map_arg((user.args, user.kwargs), fill)
            filled += 1
        if not node.users:
            graph_module.graph.erase_node(node)
    graph_module.recompile()
    return filled


def filled_in(size: Node, number: int, argument: Node) -> Node | int:
    return number if argument is size else argument


def known(node: Node) -> int | None:
    """Return the integer that a call always returns; None for any other node."""
    value: Any = value_of(node) if node.op in ("call_function", "call_method") else None
    if isinstance(value, torch.SymInt) and value.node.expr.is_Integer:
        return int(value.node.expr)
    return value if type(value) is int else None
