"""Queries about a graph's nodes: values, dependencies, and the layers of weights."""

from __future__ import annotations

import operator
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

# Dynamo names a weight by its path in the model, with a number for each module in a list, such as a layer.
LAYER = re.compile(r"modules_(\d+)_|_layers_(\d+)_", re.IGNORECASE)


def value_of(node: Node) -> Any:
    """Return the fake value that tracing recorded for a node, with any tracer."""
    return node.meta["val"] if "val" in node.meta else node.meta.get("example_value")


def hint(size: int | torch.SymInt) -> int:
    """Return a size as a number, a symbol's value during tracing. Adds no guard."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


def called_name(node: Node) -> str:
    """Return the name of the function or method that a node calls; "" if it has none."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def model_layer(name: str) -> int | None:
    """Return the model layer in an input's name, the first number; None if there is none."""
    found = LAYER.search(name)
    return None if found is None else int(next(filter(None, found.groups())))


def is_weight(node: Node) -> bool:
    return node.op == "placeholder" and "parameters" in node.name.lower()


def weight_layer(node: Node) -> int | None:
    """Return the model layer of a weight; None for other nodes, and for weights outside the layers."""
    return model_layer(node.name) if is_weight(node) else None


def arguments_of(node: Node) -> dict[str, Any]:
    """Return an op's arguments by the names of its schema, without omitted defaults."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    return {argument.name: value for argument, value in zip(schema, node.args, strict=False)}


def reached(start: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """Yield each node that is reached from these by `following`, once and nearest first, but not these."""
    todo = deque(start)
    seen = set(todo)
    while todo:
        for node in following(todo.popleft()):
            if node not in seen:
                seen.add(node)
                todo.append(node)
                yield node


def ancestors_of(node: Node, up_to: Any = None) -> Iterator[Node]:
    """Yield every node that this one depends on, nearest first, but no inputs of calls of `up_to`."""
    return reached([node], lambda at: () if up_to is not None and at.target is up_to else at.all_input_nodes)


def turns_neighbours(keys: Node) -> bool:
    """Return whether RoPE rotates channels 2·j and 2·j + 1 together, instead of j and j + h.

    Such a graph slices every second channel of a linear layer's output.
    """
    taken = (node.args[1] for node in ancestors_of(keys, up_to=F.linear) if node.target is operator.getitem)
    return any(isinstance(one, slice) and one.step == 2 for of in taken if isinstance(of, tuple) for one in of)


def output_node(graph_module: GraphModule) -> Node:
    return next(iter(graph_module.graph.find_nodes(op="output")))


def extract(root: GraphModule, inputs: Iterable[Node], nodes: Iterable[Node], outputs: Iterable[Node]) -> GraphModule:
    """Return the nodes between `inputs` and `outputs` as a separate graph."""
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return GraphModule(root, graph)
