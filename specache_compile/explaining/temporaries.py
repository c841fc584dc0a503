"""The device memory that a graph's own tensors need, computed from shapes."""

from __future__ import annotations

from torch import Tensor
from torch.fx import GraphModule, Node

from specache_compile.kernels.costs import bytes_of
from specache_compile.passes.reading.nodes import value_of

from .times.node_costs import operator_name

VIEWS = {
    "_unsafe_view", "alias", "detach", "expand", "flatten", "getitem", "permute", "reshape", "select", "slice",
    "squeeze", "t", "transpose", "unflatten", "unsqueeze", "view",
}  # fmt: skip


def temporaries(graph_module: GraphModule) -> int:
    """The most bytes of a graph's own tensors alive at once, in the graph's order and with nothing fused."""
    nodes = list(graph_module.graph.nodes)
    owner: dict[Node, Node] = {}
    last: dict[Node, int] = {}
    for place, node in enumerate(nodes):
        inputs = node.all_input_nodes
        owner[node] = owner[inputs[0]] if inputs and operator_name(node) in VIEWS else node
        for used in inputs:
            last[owner[used]] = place
    dying: dict[int, list[Node]] = {}
    for node, place in last.items():
        dying.setdefault(place, []).append(node)
    alive = most = 0
    for place, node in enumerate(nodes):
        if owner[node] is node:
            alive += own_bytes(node)
        most = max(most, alive)
        alive -= sum(own_bytes(dead) for dead in dying.get(place, ()))
    return most


def own_bytes(node: Node) -> int:
    """Bytes that a node allocates; 0 for the graph's inputs."""
    if node.op in ("placeholder", "output", "get_attr"):
        return 0
    value = value_of(node)
    parts = value if isinstance(value, (list, tuple)) else [value]
    return sum(bytes_of(part) for part in parts if isinstance(part, Tensor))
