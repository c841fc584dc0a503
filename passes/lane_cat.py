"""Concatenations in a graph that is about to be widened: how vmap is to treat them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from .attention_forms import argument
from .context import value_of


def show_cats(graph_module: GraphModule) -> int:
    """Give concatenations a lane axis of their own; returns how many there are.

        both = torch.cat((x, y), dim=-1)           both = cat((x, y), -1)

    vmap has a rule for it too, but one that reads sizes as numbers: a batch that is a symbol would become one.
    """
    shown = 0
    for node in graph_module.graph.find_nodes(op="call_function", target=torch.cat):
        parts, dim = node.args[0], argument(node, 1, "dim")
        if value_of(node).dim() == max(value_of(part).dim() for part in parts):  # an empty [0] is left to torch
            node.target, node.args, node.kwargs = cat, (parts, dim or 0), {}
            shown += 1
    graph_module.recompile()
    return shown


class Cat(torch.autograd.Function):
    """`torch.cat` along a dim counted from the end; a part without lanes is the same in each."""

    @staticmethod
    def forward(dim: int, *parts: Tensor) -> Tensor:
        return torch.cat(parts, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to keep: inference only."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], dim: int, *parts: Tensor) -> tuple[Tensor, int]:
        lanes = [
            part.expand(info.batch_size, *part.shape) if at is None else part.movedim(at, 0)
            for part, at in zip(parts, in_dims[1:], strict=True)
        ]
        return torch.cat(lanes, dim), 0


def cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    return Cat.apply(dim if dim < 0 else dim - parts[0].dim(), *parts)
