"""What a graph's nodes are: their values, what they come from, and the weights of the model's layers among them."""

from __future__ import annotations

import operator
import re
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch.fx import GraphModule, Node

# Dynamo names a weight by its place in the model, whose modules are numbered where they stand in a list, as layers do.
LAYER = re.compile(r"modules_(\d+)_|_layers_(\d+)_", re.IGNORECASE)


def value_of(node: Node) -> Any:
    """The fake value that tracing recorded for a node, whichever tracer made it."""
    return node.meta["val"] if "val" in node.meta else node.meta.get("example_value")


def model_layer(name: str) -> int | None:
    """The model's layer that an input's name says it is of: the first number; None where there is none."""
    found = LAYER.search(name)
    return None if found is None else int(next(filter(None, found.groups())))


def is_weight(node: Node) -> bool:
    return node.op == "placeholder" and "parameters" in node.name.lower()


def weight_layer(node: Node) -> int | None:
    """The model's layer that a node is a weight of; None for what is no weight, or in no layer."""
    return model_layer(node.name) if is_weight(node) else None


def arguments_of(node: Node) -> dict[str, Any]:
    """An op's arguments by the names of its schema; those that are left to their defaults are not there."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    return {argument.name: value for argument, value in zip(schema, node.args, strict=False)}


def nodes_behind(node: Node, up_to: Any = None) -> Iterator[Node]:
    """Every node that this one comes from, the nearest first; none behind calls of the function `up_to`."""
    seen, todo = {node}, deque([node])
    while todo:
        for behind in todo.popleft().all_input_nodes:
            if behind not in seen:
                seen.add(behind)
                if up_to is None or behind.target is not up_to:
                    todo.append(behind)
                yield behind


def turns_neighbours(keys: Node) -> bool:
    """Whether RoPE turns channels 2·j and 2·j + 1 together, and not j and j + h.

    RoPE then takes out every second channel of what a linear layer gives.
    """
    taken = (node.args[1] for node in nodes_behind(keys, up_to=F.linear) if node.target is operator.getitem)
    return any(isinstance(one, slice) and one.step == 2 for of in taken if isinstance(of, tuple) for one in of)


def output_node(graph_module: GraphModule) -> Node:
    return next(iter(graph_module.graph.find_nodes(op="output")))
