"""The nodes of a rewritten graph: the layer of each, which are launches, and the FLOPs and bytes of products."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from specache_compile.kernels.op import op_of
from specache_compile.passes.plan import tag_of
from specache_compile.passes.reading import nodes
from specache_compile.passes.reading.nodes import is_weight, model_layer, value_of

from .workload import bytes_of, elements, size_of

AFTER = 1 << 30
VIEWS = {
    "_unsafe_view", "alias", "detach", "expand", "flatten", "getitem", "permute", "reshape", "select", "slice",
    "squeeze", "t", "transpose", "unflatten", "unsqueeze", "view",
}  # fmt: skip
# Torch's operators that count as launches.
WORK = ("linear", "matmul", "mm", "bmm", "addmm", "scaled_dot_product_attention", "embedding")


def operator_name(node: Node) -> str:
    """`mm` of aten.mm.default, `decode_attention` of specache.decode_attention.default, `linear` of F.linear."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return name.split(".")[0]


def is_launch(node: Node) -> bool:
    """Whether a node is a launch that counts: a tier op, a matrix product, an attention or an embedding.

    The compiler fuses pointwise nodes into their neighbours, whose reads and writes are counted.
    """
    name = operator_name(node)
    return node.op in ("call_function", "call_method") and (
        op_of(node.target) is not None or name in WORK or "grouped_mm" in name
    )


def product_cost(node: Node) -> tuple[float, float]:
    """FLOPs, and bytes from device memory, of a product, an exact attention or an embedding, by the graph's shapes."""
    tensors = [value_of(argument) for argument in node.all_input_nodes]
    result = value_of(node)
    out = result if isinstance(result, Tensor) else next((r for r in result if isinstance(r, Tensor)), None)
    name = operator_name(node)
    if name == "embedding":
        return 0.0, 2 * bytes_of(out)
    moved = sum(map(bytes_of, tensors)) + bytes_of(out)
    if name == "scaled_dot_product_attention":
        q, keys = value_of(node.args[0]), value_of(node.args[1])  # type: ignore[arg-type]
        tokens, seen = size_of(q.shape[2]), size_of(keys.shape[2])
        causal = 0.5 if tokens == seen and tokens > 1 else 1.0
        return 4 * causal * elements(q) * seen, moved
    factor = tensors[-1] if name == "addmm" else tensors[0]
    if "grouped_mm" in name:  # each token uses only its own experts' weights
        factor, weights = tensors[0], tensors[1]
        rows = elements(factor) // size_of(factor.shape[-1])
        unread = max(0, size_of(weights.shape[0]) - rows) * bytes_of(weights) // size_of(weights.shape[0])
        return 2 * elements(out) * size_of(factor.shape[-1]), moved - unread
    inner = size_of(value_of(node.args[1]).shape[-1] if name == "addmm" else factor.shape[-1])  # type: ignore[arg-type]
    return 2 * elements(out) * inner, moved


def arguments_of(node: Node) -> dict[str, Any]:
    """A tier op's arguments by name, as fakes."""
    given = nodes.arguments_of(node).items()
    return {name: value_of(value) if isinstance(value, Node) else value for name, value in given}


def layers_of(graph_module: GraphModule) -> dict[Node, str]:
    """For each node "0", "1", ... or "before" the first layer, "after" the last one.

    A node without a weight belongs to the newest layer among its inputs. Nodes behind weights of no layer (the final
    norm, the head) are "after". A layer's nodes before its first weight count to the layer before.
    """
    found: dict[Node, int] = {}
    sites_layer: dict[int, int] = {}
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            number = model_layer(node.name)
            found[node] = -1 if number is None else number
            continue
        inputs = node.all_input_nodes
        tag = tag_of(node)
        found[node] = max((found[i] for i in inputs), default=-1)
        if found[node] >= 0 and any(is_outer_weight(i) for i in inputs):
            found[node] = AFTER
        # A fetch or a store may have no weight among its inputs: its state identifies the layer.
        if tag is not None and found[node] in (-1, AFTER):
            found[node] = sites_layer.get(tag.site, found[node])
        elif tag is not None:
            sites_layer.setdefault(tag.site, found[node])
    return {node: "before" if n < 0 else "after" if n == AFTER else str(n) for node, n in found.items()}


def is_outer_weight(node: Node) -> bool:
    """A weight in no layer, itself or its transpose."""
    while len(node.all_input_nodes) == 1 and operator_name(node) in ("t", "permute", "transpose"):
        node = node.all_input_nodes[0]
    return is_weight(node) and model_layer(node.name) is None
