"""The nodes of a rewritten graph: the layer of each, and which are launches."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from specache_compile.kernels.op import op_of
from specache_compile.passes.plan import tag_of
from specache_compile.passes.reading.nodes import called_name, is_weight, model_layer

AFTER = 1 << 30
VIEWS = {
    "_unsafe_view", "alias", "detach", "expand", "flatten", "getitem", "permute", "reshape", "select", "slice",
    "squeeze", "t", "transpose", "unflatten", "unsqueeze", "view",
}  # fmt: skip
# Torch's operators that count as launches.
WORK = ("linear", "matmul", "mm", "bmm", "addmm", "scaled_dot_product_attention", "embedding")


def operator_name(node: Node) -> str:
    """`mm` of aten.mm.default, `decode_attention` of specache.decode_attention.default, `linear` of F.linear."""
    return called_name(node).split(".")[0]


def is_launch(node: Node) -> bool:
    """Whether a node is a launch that counts: a tier op, a matrix product, an attention or an embedding.

    The compiler fuses pointwise nodes into their neighbours, whose reads and writes are counted.
    """
    name = operator_name(node)
    return node.op in ("call_function", "call_method") and (
        op_of(node.target) is not None or name in WORK or "grouped_mm" in name
    )


def layers_of(graph_module: GraphModule) -> dict[Node, str]:
    """For each node "0", "1", ... or "before" the first layer, "after" the last one.

    A node without a weight belongs to the newest layer among its inputs. Nodes behind weights of no layer (the final
    norm, the head) are "after". What only later nodes use, such as a norm before its weight, belongs to these, but not
    the sum that ends a layer.
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
        weights = filter(None, map(weight_behind, inputs))
        if found[node] >= 0 and any(model_layer(weight.name) is None for weight in weights):
            found[node] = AFTER
        # A fetch or a store may have no weight among its inputs: its state identifies the layer.
        if tag is not None and found[node] in (-1, AFTER):
            found[node] = sites_layer.get(tag.site, found[node])
        elif tag is not None:
            sites_layer.setdefault(tag.site, found[node])
    for node in reversed(list(found)):
        if node.op.startswith("call") and not is_launch(node) and not is_sum(node):
            later = {found[user] for user in node.users if user.op != "output"}
            found[node] = later.pop() if len(later) == 1 else found[node]
    return {node: "before" if n < 0 else "after" if n == AFTER else str(n) for node, n in found.items()}


def is_sum(node: Node) -> bool:
    return operator_name(node) == "add" and len(node.all_input_nodes) == 2


def weight_behind(node: Node) -> Node | None:
    """The weight that a node is, or is a view of; None for any other node."""
    while len(node.all_input_nodes) == 1 and operator_name(node) in VIEWS:
        node = node.all_input_nodes[0]
    return node if is_weight(node) else None
