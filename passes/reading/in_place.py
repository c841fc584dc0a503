"""In-place writes of a captured graph: find them, and turn writes to inputs into values.

A graph may write to tensors that outlive it, such as a rotary table that grows, or a recurrent state. Such a write
must not run in a pre-decode, and only lane 0 may do it.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from specache_compile.passes.clean_up import writes

from .nodes import value_of


def unknown_write(graph_module: GraphModule) -> Node | None:
    """Return a write to a graph input that `take_writes` cannot turn into a value, or None.

    It supports `input.copy_(value)`, and `input[:, number].copy_(value)` with an unused result.
    """
    graph = graph_module.graph
    inputs = {memory_of(node): node for node in graph.find_nodes(op="placeholder") if memory_of(node) is not None}
    order = {node: number for number, node in enumerate(graph.nodes)}

    def stays(view: Node, at: Node) -> bool:
        return order[view] < order[at] and any(order[user] > order[at] for user in view.users)

    for node in graph.nodes:
        target, memory = written(node)
        if memory is None or memory not in inputs:
            continue
        views = [view for view in graph.nodes if memory_of(view) == memory and view.op != "placeholder"]
        known = target is inputs[memory] or (is_part(target, inputs[memory]) and not node.users)
        if node.target != "copy_" or not known or any(stays(view, node) for view in views):
            return node
    return None


def is_part(node: Node, whole: Node) -> bool:
    """Return whether a node is `whole[:, ..., number]` (Zamba's state of one head)."""
    if node.target is not operator.getitem or node.args[0] is not whole or not isinstance(node.args[1], tuple):
        return False
    *before, number = node.args[1]
    return isinstance(number, int) and all(x == slice(None) for x in before)


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


def take_writes(graph_module: GraphModule) -> dict[Node, Node]:
    """Remove writes to inputs from the graph; returns each written input and its final value.

    table.copy_(new)                   value = new_value(table, new)
    out = mul(x, table)                out = mul(x, value)

    state[:, 3].copy_(new)             value = new_part(state, (:, 3), new)
    """
    graph = graph_module.graph
    written: dict[Node, Node] = {}
    whole: dict[Node, Node] = {}  # a value's input
    for node in list(graph.nodes):
        if node.op == "output":
            break
        target = node.args[0] if node.target == "copy_" else None
        for before, value in written.items():
            node.replace_input_with(before, value)
        if not isinstance(target, Node):
            continue
        before, index = (target.args[0], target.args[1:]) if target.target is operator.getitem else (target, ())
        of = whole.get(before, before)
        if of.op != "placeholder":
            continue
        with graph.inserting_before(node):
            value = graph.call_function(new_part if index else new_value, (before, *index, node.args[1]))
        value.meta["example_value"] = value_of(of)
        node.replace_all_uses_with(value)
        graph.erase_node(node)
        written[of], whole[value] = value, of
    return written


def new_value(before: Tensor, source: Tensor) -> Tensor:
    """Return the value of `before` after `before.copy_(source)`."""
    return source.to(before).expand(before.shape).clone()


def new_part(before: Tensor, index: tuple[Any, ...], source: Tensor) -> Tensor:
    """Return the value of `before` after `before[index].copy_(source)`, where only the last index is a number."""
    part = source.to(before).expand(before[index].shape)
    return before.select_scatter(part, len(index) - 1, index[-1])
