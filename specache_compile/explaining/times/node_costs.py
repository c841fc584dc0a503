"""Which nodes of a rewritten graph are launches, and the FLOPs and bytes of its products."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node

from specache_compile.kernels.op import op_of
from specache_compile.passes.overlap import is_work
from specache_compile.passes.reading import nodes
from specache_compile.passes.reading.nodes import value_of

from .workload import bytes_of, elements, size_of

VIEWS = {
    "_unsafe_view", "alias", "detach", "expand", "flatten", "getitem", "permute", "reshape", "select", "slice",
    "squeeze", "t", "transpose", "unflatten", "unsqueeze", "view",
}  # fmt: skip


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
        op_of(node.target) is not None or is_work(node) or name == "embedding" or "grouped_mm" in name
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
