"""The layer of the model that each node of a graph belongs to, by the weights that it uses."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from specache_compile.passes.plan import tag_of
from specache_compile.passes.reading.nodes import is_weight, model_layer

from .times.node_costs import operator_name

AFTER = 1 << 30


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
