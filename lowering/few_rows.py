"""On a CPU, replace matrix products of a few rows by a kernel that reads the weight once, at memory bandwidth."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from specache_compile.kernels.few_rows.few_rows_ops import DTYPES, MOST_ROWS, library_of
from specache_compile.passes.reading.nodes import value_of, weight_layer

AT = torch.ops.aten
VIEWS = (AT.view.default, AT.alias.default)
FEW_ROWS, FEW_ROWS_EACH = torch.ops.specache.few_rows.default, torch.ops.specache.few_rows_each.default


def few_rows(graph_module: GraphModule) -> int:
    """Replace products of up to `MOST_ROWS` rows and a weight by `few_rows`; returns the number of products.

        w = t(weight)                    y = few_rows(x, weight, None)
        y = mm(x, w)

        y = linear(x, weight)            rows = flatten(x, 0, -2)
                                         y = unflatten(few_rows(rows, weight, None), 0, ...)

    A graph widened to two lanes has the first form, a graph captured by Dynamo the second. BLAS libraries read 16-bit
    weights more slowly, and take twice as long for two float32 rows as for one. `together` joins products of one x.
    """
    found: list[Node] = []
    for node in graph_module.graph.nodes:
        given = product_of(node)
        if given is not None:
            node.target, node.args = FEW_ROWS, given
            found.append(node)
    rows_of: dict[Node, Node] = {}
    for node in linears(graph_module):
        if is_few(math.prod(value_of(node).shape[:-1])):
            found.append(as_rows(node, rows_of))
    together(graph_module, found)
    graph_module.recompile()
    return len(found)


def as_rows(linear: Node, rows_of: dict[Node, Node]) -> Node:
    """Replace a linear layer by `few_rows` of x as a matrix of rows, shared by all layers of that x."""
    graph = linear.graph
    x, weight, *bias = cast("tuple[Node, ...]", linear.args)
    with graph.inserting_before(linear):
        if x not in rows_of:
            rows_of[x] = graph.call_function(torch.flatten, (x, 0, -2))
            rows_of[x].meta["example_value"] = value_of(x).flatten(0, -2)
        product = graph.call_function(FEW_ROWS, (rows_of[x], weight, bias[0] if bias else None))
        product.meta["example_value"] = value_of(linear).flatten(0, -2)
        out = graph.call_function(torch.unflatten, (product, 0, tuple(value_of(linear).shape[:-1])))
        out.meta["example_value"] = value_of(linear)
    linear.replace_all_uses_with(out)
    graph.erase_node(linear)
    return product


def together(graph_module: GraphModule, products: Sequence[Any]) -> None:
    """Join products of one x with weights of one layer into one op: for example queries, keys and values.

    q = few_rows(x, w_q, None)       q, k = few_rows_each(x, [w_q, w_k], [None, None])
    k = few_rows(x, w_k, None)
    """
    groups: dict[Any, list[Any]] = {}
    for node in products:
        x, *given = node.args
        if all(other is None or other.op == "placeholder" for other in given):
            groups.setdefault((view_key(x), weight_layer(given[0])), []).append(node)
    for nodes in groups.values():
        if len(nodes) > 1:
            x, weights, biases = ([node.args[place] for node in nodes] for place in range(3))
            with graph_module.graph.inserting_before(nodes[0]):
                each = graph_module.graph.call_function(FEW_ROWS_EACH, (x[0], weights, biases))
                each.meta["example_value"] = [value_of(node) for node in nodes]
            for place, node in enumerate(nodes):
                node.target, node.args = operator.getitem, (each, place)


def view_key(x: Node) -> Any:
    """Return a key for x: the viewed node and the views. Tracing creates one view per product."""
    return (x.target, view_key(x.args[0]), str(x.args[1:])) if x.target in VIEWS else x  # type: ignore[arg-type]


def product_of(node: Node) -> tuple[Node, Node, Node | None] | None:
    """Return x, weight and bias of a product that the kernel supports; None for any other node."""
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
    """Return whether the number of rows is constant and at most `MOST_ROWS`."""
    return isinstance(rows, int) and 0 < rows <= MOST_ROWS


def few_rows_op_by_op(graph_module: GraphModule) -> int:
    """Replace linear layers of a graph that runs op by op with the same kernel; returns the number of layers.

    y = linear(x, weight, bias)          y = linear_of_few_rows(x, weight, bias)
    """
    found = linears(graph_module)
    for node in found:
        library_of(*(value_of(n) for n in node.all_input_nodes))
        node.target = linear_of_few_rows
    graph_module.recompile()
    return len(found)


def linears(graph_module: GraphModule) -> list[Node]:
    """Return the linear layers that the kernel supports, with any number of rows."""
    found = []
    for node in graph_module.graph.find_nodes(op="call_function", target=F.linear):
        tensors = [value_of(n) for n in node.all_input_nodes]
        if not node.kwargs and all(map(is_plain, tensors)) and is_linear(*tensors):
            found.append(node)
    return found


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is plain: the kernel cannot read the data of a subclass."""
    return tensor.device.type == "cpu" and tensor.dtype in DTYPES and not is_traceable_wrapper_subclass(tensor)


def is_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether shapes fit a linear layer: x [..., m], weight [n, m], bias [n]; all of one dtype."""
    same = x.dtype == weight.dtype == (weight if bias is None else bias).dtype
    return same and x.dim() > 1 and weight.dim() == 2 and (bias is None or bias.shape == weight.shape[:1])


def linear_of_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x [..., m] · weightᵀ [m, n] + bias [n] → [..., n], in C++ if x has few rows."""
    rows = x.flatten(0, -2)
    return torch.ops.specache.few_rows_fused(rows, weight, bias).unflatten(0, x.shape[:-1])
