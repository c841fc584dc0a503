"""Which of the model's layers a node of a graph belongs to, read off the weights that it uses."""

from __future__ import annotations

import re

from torch.fx import GraphModule, Node

from specache_compile.passes.context import LAYER

from .roofline import STATE_NAME, operator_name


def layers_of(graph_module: GraphModule) -> dict[Node, str]:
    """For each node "0", "1", ... or "before" the first layer, "after" the last one.

    A node that uses no weight belongs to the newest layer among its inputs; what comes behind weights that are in no
    layer (the final norm, the head) is after. Nodes of a layer that come before its first weight count to the last.
    """
    found: dict[Node, int] = {}
    sites_layer: dict[str, int] = {}
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            match = LAYER.search(node.name)
            found[node] = int(next(filter(None, match.groups()))) if match else -1
            continue
        inputs = node.all_input_nodes
        state = next((m.group(2) for i in inputs if (m := re.fullmatch(STATE_NAME, i.name))), None)
        found[node] = max((found[i] for i in inputs), default=-1)
        if found[node] >= 0 and any(is_outer_weight(i) for i in inputs):
            found[node] = AFTER
        # A fetch or a store has no weight behind it but its layer's attention, or nothing at all: its state tells.
        if state is not None and found[node] in (-1, AFTER):
            found[node] = sites_layer.get(state, found[node])
        elif state is not None:
            sites_layer.setdefault(state, found[node])
    return {node: "before" if n < 0 else "after" if n == AFTER else str(n) for node, n in found.items()}


AFTER = 1 << 30


def is_outer_weight(node: Node) -> bool:
    """A weight in no layer, itself or its transpose."""
    while len(node.all_input_nodes) == 1 and operator_name(node) in ("t", "permute", "transpose"):
        node = node.all_input_nodes[0]
    return node.op == "placeholder" and "parameters" in node.name.lower() and not LAYER.search(node.name)
