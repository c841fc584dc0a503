"""Order the step: waits as late, and copies as early, as the data flow allows."""

from __future__ import annotations

from collections.abc import Iterable

import networkx as nx
from torch.fx import GraphModule, Node

from specache_compile.kernels.op import op_of

from .plan import RewritePlan
from .reading.in_place import mutated
from .reading.nodes import output_node


def overlap(graph_module: GraphModule, plan: RewritePlan) -> GraphModule:
    """Find a stable topological order with the latest possible waits and the earliest possible copies.

    wait_0; q1 = ...; wait_1           q0 = ...; wait_0; attend_0
    attend_0; ...; attend_1            select_0; prefetch_0; ...; q1 = ...
    select_0; prefetch_0; ...          wait_1; attend_1; ...
    """
    before, end = list(graph_module.graph.nodes), output_node(graph_module)
    if any(is_wait(node) or is_copy(node) for node in before):
        for node in schedule(dependencies(before), before):
            if node.op not in ("placeholder", "output"):
                end.prepend(node)
    return graph_module


def dependencies(nodes: Iterable[Node]) -> nx.DiGraph:
    """Return the step as a DAG, with an edge for each use of a value and each ordered access to a state tensor."""
    dag: nx.DiGraph = nx.DiGraph()
    last_write: dict[Node, Node] = {}
    readers: dict[Node, list[Node]] = {}
    for node in nodes:
        dag.add_node(node)
        written = mutated(node)
        for used in node.all_input_nodes:
            dag.add_edge(used, node)
            if used in last_write:
                dag.add_edge(last_write[used], node)
        for state in written:
            dag.add_edges_from((reader, node) for reader in readers.pop(state, []))
            last_write[state] = node
        for used in node.all_input_nodes:
            if used not in written:
                readers.setdefault(used, []).append(node)
    return dag


def schedule(dag: nx.DiGraph, nodes: list[Node]) -> list[Node]:
    """Keep the order of compute nodes; move waits to their first dependant, and copies to their earliest start."""
    place_of = {node: place for place, node in enumerate(nodes)}

    def priority(node: Node) -> tuple[int, float, int]:
        place = place_of[node]
        if is_early(node):
            return 0, rank(node), place
        if is_wait(node):
            return 1, min((place_of[user] for user in dag.successors(node)), default=len(nodes)) - 0.5, place
        return 1, place, place

    return list(nx.lexicographical_topological_sort(dag, priority))


def is_wait(node: Node) -> bool:
    op = op_of(node.target)
    return op is not None and op.is_wait


def is_copy(node: Node) -> bool:
    """Return whether an op starts as early as possible: a copy, or an op that copies wait for."""
    op = op_of(node.target)
    return op is not None and op.early is not None


def is_early(node: Node) -> bool:
    """Return whether a node is a copy, or a small node that only copies use."""
    return is_copy(node) or (bool(node.users) and node.op == "call_function" and all(map(is_copy, node.users)))


def rank(node: Node) -> int:
    """Rank ready nodes: first the ops that prepare a fetch, then the fetches that the next step waits for."""
    op = op_of(node.target)
    return -1 if op is None or op.early is None else op.early
