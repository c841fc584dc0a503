"""Drop unused nodes and inputs."""

from __future__ import annotations

import operator

from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.graph import inplace_methods

from .plan import RewritePlan
from .reading.nodes import called_name

OPERATORS = {getattr(operator, name) for name in inplace_methods}  # setitem, iadd, ...


def clean_up(graph_module: GraphModule, plan: RewritePlan) -> GraphModule:
    """Drop dead nodes, and unused placeholders with their entries in `plan.inputs`.

    keys = cat([past_k, k], -2)
    out = decode_attention(q, ...)     out = decode_attention(q, ...)
    return (out, None)                 return (out, None)
    """
    graph = graph_module.graph
    graph.eliminate_dead_code(is_impure_node=is_impure)
    placeholders = graph.find_nodes(op="placeholder")
    kept = []
    for node, source in zip(placeholders, plan.inputs, strict=True):
        if node.users:
            kept.append(source)
        else:
            graph.erase_node(node)
    plan.inputs[:] = kept
    return graph_module


def is_impure(node: Node) -> bool:
    """Return whether a node must stay: a placeholder, the output, or a call that writes to its arguments."""
    return node.op in ("placeholder", "output") or writes(node) or (node.op == "call_function" and node.is_impure())


def writes(node: Node) -> bool:
    """Return whether a call mutates an argument, according to its schema, name (`scatter_`) or keyword arguments."""
    if isinstance(node.target, OpOverload):
        return bool(node.target._schema.is_mutable)
    if node.op not in ("call_method", "call_function"):
        return False
    name = called_name(node)
    in_place = name.endswith("_") and not name.endswith("__") and name not in vars(operator)  # operator.and_
    return in_place or node.target in OPERATORS or bool(node.kwargs.get("inplace")) or "out" in node.kwargs
