"""Drop what nothing uses any more."""

from __future__ import annotations

from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from .context import Context, PassReport


def clean_up(graph_module: GraphModule, context: Context) -> tuple[GraphModule, PassReport]:
    """Dead nodes and dead inputs go; `context.inputs` says which arguments the graph still takes.

    keys = cat([past_k, k], -2)
    out = decode_attention(q, ...)     out = decode_attention(q, ...)
    return (out, None)                 return (out, None)
    """
    nodes, inputs = drop_dead(graph_module, context)
    return graph_module, PassReport("clean_up", {"nodes": nodes, "inputs": inputs})


def drop_dead(graph_module: GraphModule, context: Context) -> tuple[int, int]:
    """Erase dead nodes and unused placeholders, with their entries in `context.inputs`; returns how many of each."""
    graph = graph_module.graph
    before = len(graph.nodes)
    graph.eliminate_dead_code(is_impure_node=is_impure)
    placeholders = graph.find_nodes(op="placeholder")
    kept = []
    for node, source in zip(placeholders, context.inputs, strict=True):
        if node.users:
            kept.append(source)
        else:
            graph.erase_node(node)
    dropped = len(context.inputs) - len(kept)
    context.inputs[:] = kept
    return before - len(graph.nodes) - dropped, dropped


def is_impure(node: Node) -> bool:
    """Placeholders, the output, and whatever declares to write its arguments."""
    if node.op in ("placeholder", "output"):
        return True
    if isinstance(node.target, OpOverload):
        return bool(node.target._schema.is_mutable)
    return node.op == "call_function" and node.is_impure()
