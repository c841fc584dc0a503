"""What each node of a rewritten graph costs: FLOPs, bytes from device memory, bytes over PCIe. Computed, not measured.

Pointwise nodes cost nothing: the compiler fuses them into their neighbours, whose reads and writes are counted.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node

from specache_compile.kernels.costs import Cost, Workload, bytes_of, elements, size_of
from specache_compile.kernels.op import op_of
from specache_compile.methods import METHODS
from specache_compile.passes.plan import tag_of
from specache_compile.passes.reading import nodes
from specache_compile.passes.reading.nodes import value_of

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


def is_tier_op(node: Node) -> bool:
    return op_of(node.target) is not None


def is_launch(node: Node) -> bool:
    """Whether a node is a launch that counts: a tier op, a matrix product, an attention or an embedding."""
    name = operator_name(node)
    return node.op in ("call_function", "call_method") and (is_tier_op(node) or name in WORK or "grouped_mm" in name)


def launch_cost(node: Node, load: Workload) -> Cost:
    """The cost of a launch under `load`: of a tier op by its tiers' lengths, of others by the graph's own shapes."""
    op, tag = op_of(node.target), tag_of(node)
    if op is not None:
        if tag is None:
            raise ValueError(f"{node.name} is at no site")
        return op.cost(arguments_of(node, load), load, tag.site)
    tensors = [value_of(argument) for argument in node.all_input_nodes]
    result = value_of(node)
    out = result if isinstance(result, Tensor) else next((r for r in result if isinstance(r, Tensor)), None)
    name = operator_name(node)
    if name == "embedding":
        return Cost(hbm=2 * bytes_of(out))
    moved = sum(map(bytes_of, tensors)) + bytes_of(out)
    if name == "scaled_dot_product_attention":
        q, keys = value_of(node.args[0]), value_of(node.args[1])  # type: ignore[arg-type]
        tokens, seen = size_of(q.shape[2]), size_of(keys.shape[2])
        causal = 0.5 if tokens == seen and tokens > 1 else 1.0
        return Cost(4 * causal * elements(q) * seen, moved)
    factor = tensors[-1] if name == "addmm" else tensors[0]
    if "grouped_mm" in name:  # each token uses only its own experts' weights
        factor, weights = tensors[0], tensors[1]
        rows = elements(factor) // size_of(factor.shape[-1])
        unread = max(0, size_of(weights.shape[0]) - rows) * bytes_of(weights) // size_of(weights.shape[0])
        return Cost(2 * elements(out) * size_of(factor.shape[-1]), moved - unread)
    inner = size_of(value_of(node.args[1]).shape[-1] if name == "addmm" else factor.shape[-1])  # type: ignore[arg-type]
    return Cost(2 * elements(out) * inner, moved)


def arguments_of(node: Node, load: Workload) -> dict[str, Any]:
    """A tier op's arguments by name and its state tensors by field, as fakes; `on_host`: whether the op gets the host
    tier."""
    state = {
        tag.field: value_of(used) for used in node.all_input_nodes if (tag := tag_of(used)) is not None and tag.field
    }
    given = nodes.arguments_of(node).items()
    values = {name: value_of(value) if isinstance(value, Node) else value for name, value in given}
    on_host = any(field.on_host and field.name in state for field in METHODS[load.options.method].fields)
    return {**state, **values, "on_host": on_host}
