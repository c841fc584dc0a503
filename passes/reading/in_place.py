"""In-place writes of a captured graph.

A graph may write to tensors that outlive it, such as a rotary table that grows, or a recurrent state. A pre-decode
must leave no such write behind (`specache_compile/runtime/step.py`).
"""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from specache_compile.passes.clean_up import writes

from .nodes import value_of


def written(node: Node) -> tuple[Any, int | None]:
    """Return the argument that a call mutates, and its memory; None for each that is unknown."""
    target = node.kwargs.get("out", node.args[0] if node.args else None) if writes(node) else None
    return target, memory_of(target) if isinstance(target, Node) else None


def written_inputs(graph_module: GraphModule) -> frozenset[int]:
    """Return the positions of the inputs that a graph writes to, directly or through a view."""
    memory = {written(node)[1] for node in graph_module.graph.nodes} - {None}
    inputs = graph_module.graph.find_nodes(op="placeholder")
    return frozenset(position for position, node in enumerate(inputs) if memory_of(node) in memory)


def memory_of(node: Node) -> int | None:
    """Identify a node's storage, which views share."""
    value = value_of(node)
    return value.untyped_storage()._cdata if isinstance(value, FakeTensor) else None
