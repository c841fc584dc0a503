"""On a CPU, replace products of a few rows by a kernel that reads the weight once, at memory speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from specache_compile.kernels.few_rows.definition import DTYPES, MOST_ROWS, library_of
from specache_compile.passes.reading.nodes import value_of

AT = torch.ops.aten


def few_rows(graph_module: GraphModule) -> int:
    """Put `few_rows` in place of products of up to `MOST_ROWS` rows and a weight; returns how many.

        w = t(weight)                    y = few_rows(x, weight, None)
        y = mm(x, w)

        y = linear(x, weight)            y = linear_of_few_rows(x, weight)

    A graph that was widened to two lanes has the first form, one as Dynamo captured it the second. Libraries for large
    products read a weight of 16 bits more slowly, and in float32 take twice as long for two rows as for one.
    """
    changed = 0
    for node in graph_module.graph.nodes:
        found = product_of(node)
        if found is not None:
            node.target, node.args = torch.ops.specache.few_rows.default, found
            changed += 1
    few = [node for node in linears(graph_module) if is_few(value_of(node).shape[:-1].numel())]
    return changed + replaced(graph_module, few)


def product_of(node: Node) -> tuple[Node, Node, Node | None] | None:
    """x, weight and bias of a product that the kernel takes; None for any other node."""
    given: Any = node.args
    if node.target is AT.mm.default:
        (x, w), bias = given, None
    elif node.target is AT.addmm.default and len(given) == 3 and not node.kwargs:
        bias, x, w = given
    else:
        return None
    if w.target is not AT.t.default:
        return None
    tensors = [value_of(n) for n in (x, w, bias) if n is not None]
    rows, dtypes = tensors[0].shape[0], {tensor.dtype for tensor in tensors}
    right = len(dtypes) == 1 and all(map(is_plain, tensors))
    whole_bias = bias is None or value_of(bias).shape == value_of(w).shape[1:]
    return (x, w.args[0], bias) if right and whole_bias and is_few(rows) else None


def is_few(rows: int | torch.SymInt) -> bool:
    """Whether so many rows, a number that is known, are few."""
    return isinstance(rows, int) and 0 < rows <= MOST_ROWS


def few_rows_op_by_op(graph_module: GraphModule) -> int:
    """Replace linear layers of a graph that runs as Dynamo captured it by the same kernel; returns how many.

    y = linear(x, weight, bias)          y = linear_of_few_rows(x, weight, bias)
    """
    return replaced(graph_module, linears(graph_module))


def linears(graph_module: GraphModule) -> list[Node]:
    """The linear layers that the kernel can read, of however many rows."""
    found = []
    for node in graph_module.graph.find_nodes(op="call_function", target=F.linear):
        tensors = [value_of(n) for n in node.all_input_nodes]
        if not node.kwargs and all(map(is_plain, tensors)) and is_linear(*tensors):
            found.append(node)
    return found


def replaced(graph_module: GraphModule, nodes: Sequence[Node]) -> int:
    """Replace these linear layers; their number."""
    for node in nodes:
        library_of(*(value_of(n) for n in node.all_input_nodes))
        node.target = linear_of_few_rows
    graph_module.recompile()
    return len(nodes)


def is_plain(tensor: Tensor) -> bool:
    """Whether the kernel can read such a tensor: a subclass has other data inside."""
    return tensor.device.type == "cpu" and tensor.dtype in DTYPES and not is_traceable_wrapper_subclass(tensor)


def is_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether shapes are a linear layer's: x [..., m], weight [n, m], bias [n]; all of one dtype."""
    same = x.dtype == weight.dtype == (weight if bias is None else bias).dtype
    return same and x.dim() > 1 and weight.dim() == 2 and (bias is None or bias.shape == weight.shape[:1])


def linear_of_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., m] · weightᵀ [m, n] + bias [n] → [..., n], in C++ where x has few rows."""
    rows = x.flatten(0, -2)
    return torch.ops.specache.few_rows_fused(rows, weight, bias).unflatten(0, x.shape[:-1])
