"""vmap rules for widening a graph, where torch's rules require constant sizes or round twice."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from .attention_forms import argument
from .nodes import value_of

Dims = tuple[int | None, ...]  # of the lanes in each argument
PRODUCTS = (torch.matmul, operator.matmul, "matmul", torch.bmm, "bmm", torch.mm, "mm")


def own_rules(graph_module: GraphModule) -> int:
    """Give matrix products and concatenations our vmap rules; returns the number of replaced calls.

        hidden = linear(x, weight, bias)           hidden = rows_times(x, weight, bias)
        angles = matmul(frequencies, positions)    angles = product(frequencies, positions)
        both = cat((angles, angles), dim=-1)       both = cat((angles, angles), -1)

    Torch's vmap rules for products fail if the batch is a symbol, and they split a linear with bias into product and
    sum, which rounds twice. Its rule for cat makes the symbol a constant.
    """
    shown = 0
    for node in graph_module.graph.nodes:
        if node.target is F.linear and value_of(argument(node, 0, "input")).dim() > 1:
            arguments = (argument(node, place, name) for place, name in enumerate(("input", "weight", "bias")))
            node.target, node.args, node.kwargs = rows_times, tuple(arguments), {}
        elif is_addmm_of_rows(node):
            bias, rows, weight = node.args
            node.target, node.args = rows_times_transposed, (rows, weight, bias)
        elif node.target in PRODUCTS and not node.kwargs and all(value_of(x).dim() > 1 for x in node.args):
            node.op, node.target = "call_function", product
        elif node.target in (torch.cat, torch.ops.aten.cat.default) and all(
            value_of(x).dim() == value_of(node).dim() for x in node.all_input_nodes
        ):
            parts, dim = argument(node, 0, "tensors"), argument(node, 1, "dim")
            node.target, node.args, node.kwargs = cat, (parts, dim or 0), {}
        else:
            continue
        shown += 1
    graph_module.recompile()
    return shown


def is_addmm_of_rows(node: Node) -> bool:
    """Return whether a call is addmm(bias [n], rows, weight), unscaled: the linear layer of GPT-2 and relatives."""
    return node.target is torch.addmm and not node.kwargs and len(node.args) == 3 and value_of(node.args[0]).dim() == 1


def with_lanes(
    rule: Callable[..., tuple[Tensor, int | None]],
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Give a function a vmap rule: (info, in_dims, *arguments) → (result, dimension of the lanes in it).

    Only inference is supported, so nothing is saved for a backward pass.
    """

    def decorate(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        class WithLanes(torch.autograd.Function):
            forward = staticmethod(function)
            setup_context = staticmethod(lambda ctx, inputs, output: None)
            vmap = staticmethod(rule)

        @functools.wraps(function)
        def apply(*arguments: Any) -> Tensor:
            return WithLanes.apply(*arguments)

        return apply

    return decorate


def linear_of_lanes(info: Any, in_dims: Dims, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, int]:
    rank = x.dim() - (in_dims[0] is not None)
    x = lanes_first(x, in_dims[0], rank)
    if in_dims[1] is None and in_dims[2] is None:
        return linear(x, weight, bias), 0
    # An expert's weights, selected by the lane's token.
    out = matmul(x, lanes_first(weight, in_dims[1], rank).mT)
    return out if bias is None else out + lanes_first(bias, in_dims[2], rank), 0


@with_lanes(linear_of_lanes)
def rows_times(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x [..., m] · weightᵀ [m, n] + bias [n]; the lanes of x become further rows of one product."""
    return linear(x, weight, bias)


def matmul_of_lanes(info: Any, in_dims: Dims, a: Tensor, b: Tensor) -> tuple[Tensor, int]:
    factors = list(zip((a, b), in_dims, strict=True))
    rank = max(factor.dim() - (dim is not None) for factor, dim in factors)
    return matmul(*(lanes_first(factor, dim, rank) for factor, dim in factors)), 0


@with_lanes(matmul_of_lanes)
def product(a: Tensor, b: Tensor) -> Tensor:
    """Compute a [..., l, m] · b [..., m, n]; all lanes share a factor without lanes."""
    return matmul(a, b)


def cat_of_lanes(info: Any, in_dims: Dims, dim: int, *parts: Tensor) -> tuple[Tensor, int]:
    lanes = [
        part.expand(info.batch_size, *part.shape) if at is None else part.movedim(at, 0)
        for part, at in zip(parts, in_dims[1:], strict=True)
    ]
    return torch.cat(lanes, dim), 0


@with_lanes(cat_of_lanes)
def cat_from_the_end(dim: int, *parts: Tensor) -> Tensor:
    """Concatenate along a negative dim; all lanes share a part without lanes."""
    return torch.cat(parts, dim)


def lanes_first(factor: Tensor, dim: int | None, rank: int) -> Tensor:
    """Reshape to [lanes, 1, ..., l, m] with `rank` axes after the lanes; a factor without lanes is unchanged."""
    if dim is None:
        return factor
    factor = factor.movedim(dim, 0) if dim else factor
    return factor[(slice(None), *[None] * (rank + 1 - factor.dim()))]


# In torch 2.11, matmul and F.linear make a symbolic batch constant; mm and bmm do not.
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x [..., m] · weightᵀ [m, n] + bias [n] as one product of rows."""
    return F.linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Compute a [..., l, m] · b [..., m, n]."""
    if b.dim() == 2:
        return linear(a, b.mT)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    flat = (factor.expand(*batch, *factor.shape[-2:]).reshape(-1, *factor.shape[-2:]) for factor in (a, b))
    return torch.bmm(*flat).view(*batch, a.shape[-2], b.shape[-1])


def rows_times_transposed(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return rows_times(rows, weight.t(), bias)


def cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    return cat_from_the_end(dim if dim < 0 else dim - parts[0].dim(), *parts)
