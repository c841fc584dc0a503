"""Matrix products in a graph that is about to be widened: how vmap is to treat them."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from .context import value_of

PRODUCTS = (torch.matmul, operator.matmul, "matmul", torch.bmm, "bmm", torch.mm, "mm")


def show_products(graph_module: GraphModule) -> int:
    """Give matrix products a lane axis of their own; returns how many there are.

        hidden = linear(x, weight, bias)           hidden = rows_times(x, weight, bias)
        angles = matmul(frequencies, positions)    angles = product(frequencies, positions)

    vmap has rules for these too, but those of torch 2.11 ask for concrete sizes, and fail where the batch is a symbol;
    and they make a product and a sum of a linear with a bias, which rounds twice.
    """
    shown = 0
    for node in graph_module.graph.nodes:
        if node.target is F.linear and value_of(node.args[0]).dim() > 1:
            node.target = rows_times
        elif is_addmm_of_rows(node):
            bias, rows, weight = node.args
            node.target, node.args = rows_times_transposed, (rows, weight, bias)
        elif node.target in PRODUCTS and all(value_of(factor).dim() > 1 for factor in node.args):
            node.op, node.target = "call_function", product
        else:
            continue
        shown += 1
    graph_module.recompile()
    return shown


def is_addmm_of_rows(node: Node) -> bool:
    """addmm(bias [n], rows, weight), unscaled: the linear layer of GPT-2 and its kin."""
    return node.target is torch.addmm and not node.kwargs and len(node.args) == 3 and value_of(node.args[0]).dim() == 1


class Rows(torch.autograd.Function):
    """x [..., m] · weightᵀ [m, n] + bias [n]; the lanes of x are so many more rows, of one product."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to keep: inference only."""

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, int]:
        rank = x.dim() - (in_dims[0] is not None)
        x = lanes_first(x, in_dims[0], rank)
        if in_dims[1] is None and in_dims[2] is None:
            return F.linear(x, weight, bias), 0
        # An expert's weights, chosen by what a lane's token is.
        out = torch.matmul(x, lanes_first(weight, in_dims[1], rank).mT)
        return out if bias is None else out + lanes_first(bias, in_dims[2], rank), 0


class Product(torch.autograd.Function):
    """matmul(a [..., l, m], b [..., m, n]); a factor without lanes is the same in each."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return torch.matmul(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to keep: inference only."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], a: Tensor, b: Tensor) -> tuple[Tensor, int]:
        factors = list(zip((a, b), in_dims, strict=True))
        rank = max(factor.dim() - (dim is not None) for factor, dim in factors)
        return torch.matmul(*(lanes_first(factor, dim, rank) for factor, dim in factors)), 0


def lanes_first(factor: Tensor, dim: int | None, rank: int) -> Tensor:
    """[lanes, 1, ..., l, m] with `rank` axes behind the lanes'; without lanes, as it is: it is broadcast."""
    if dim is None:
        return factor
    factor = factor.movedim(dim, 0) if dim else factor
    return factor[(slice(None), *[None] * (rank + 1 - factor.dim()))]


def rows_times(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return Rows.apply(input, weight, bias)


def rows_times_transposed(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return Rows.apply(rows, weight.t(), bias)


def product(a: Tensor, b: Tensor) -> Tensor:
    return Product.apply(a, b)
