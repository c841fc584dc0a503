"""A graph's hash, equal for graphs that compute the same values in the same order under any names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from .nodes import value_of


def graph_hash(graph_module: GraphModule) -> str:
    """Hash every node's op, target and arguments, and the inputs' shapes and dtypes, to 16 hex digits.

    Inputs are numbered by first use, and symbols by first appearance, since Dynamo's names and order depend on the
    call.
    """
    numbers: dict[Node, str] = {}
    symbols: dict[str, str] = {}
    lines: list[str] = []

    def number(node: Node) -> str:
        if node not in numbers:
            numbers[node] = f"%{len(numbers)}"
            if node.op in ("placeholder", "get_attr"):
                lines.append(f"{numbers[node]} {shape_of(value_of(node), symbols)}")
        return numbers[node]

    for node in graph_module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        arguments = map_arg((node.args, node.kwargs), number)
        lines.append(f"{number(node)} {node.op} {target_name(node.target)} {arguments}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def target_name(target: str | Callable[..., Any]) -> str:
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def shape_of(value: Any, symbols: dict[str, str]) -> str:
    """Describe dtype and shape, with symbols numbered by first appearance."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    sizes = []
    for size in map(str, value.shape):  # a specialised symbol prints as its number
        sizes.append(size if size.isdigit() else symbols.setdefault(size, f"s{len(symbols)}"))
    return f"{value.dtype} {value.device.type} [{', '.join(sizes)}]"
