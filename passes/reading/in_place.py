"""In-place writes of a captured graph.

A graph may write to tensors that outlive it, such as a rotary table that grows, or a recurrent state. A pre-decode
must leave no such write behind (`specache_compile/runtime/step.py`).
"""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from specache_compile.passes.clean_up import writes

from .nodes import arguments_of, value_of


def mutated(node: Node) -> list[Node]:
    """Return the arguments that a call mutates: all that the schema of an op marks, else `out` or the first."""
    if not writes(node):
        return []
    targets: Any = node.kwargs.get("out", node.args[:1])
    if isinstance(node.target, OpOverload):
        given = {**arguments_of(node), **node.kwargs}
        targets = [given.get(argument.name) for argument in node.target._schema.arguments if argument.is_write]
    return [leaf for leaf in tree_leaves(targets) if isinstance(leaf, Node)]


def written_inputs(graph_module: GraphModule) -> frozenset[int]:
    """Return the positions of the inputs that a graph writes to, directly or through a view."""
    memory = {memory_of(node) for call in graph_module.graph.nodes for node in mutated(call)} - {None}
    inputs = graph_module.graph.find_nodes(op="placeholder")
    return frozenset(position for position, node in enumerate(inputs) if memory_of(node) in memory)


def memory_of(node: Node) -> int | None:
    """Identify a node's storage, which views share."""
    value = value_of(node)
    return value.untyped_storage()._cdata if isinstance(value, FakeTensor) else None
