"""Two consecutive decode steps as a graph over two streams, compute and copy.

An edge is an order that the step guarantees. Each stream runs in order, a copy starts after earlier launches, and
a wait holds the compute stream until its fetch ends. The graph therefore shows whether accesses to state are safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import networkx as nx
from torch.fx import GraphModule, Node

from specache_compile.explaining.times.step_nodes import is_launch, operator_name
from specache_compile.kernels.op import op_of
from specache_compile.passes.plan import tag_of
from specache_compile.passes.reading.in_place import mutated

Key = tuple[int, str]


@dataclass(frozen=True)
class Launch:
    """One launch of a step.

    reads, writes: state tensors.
    guards: the slots that a wait guards.
    brings: the slots that a fetch fills.
    reads_host: it waits for the offloads by itself.
    """

    name: str
    op: str
    stream: str = "compute"
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    guards: str = ""
    brings: str = ""
    reads_host: bool = False


def launch_of(node: Node) -> Launch:
    name, op = operator_name(node), op_of(node.target)
    if op is None:
        return Launch(node.name, name)
    state = {value: tag.field for value in node.all_input_nodes if (tag := tag_of(value)) is not None and tag.field}
    slots = next((value.name for value, field in state.items() if field == "slots"), "")
    if op.is_wait:  # it only declares to mutate what it guards, for the order
        return Launch(node.name, name, guards=slots)
    written = mutated(node)
    brings = slots if op.copies and any(state[value] == "slots" for value in written) else ""
    # A fetch also reads its slots: only missing pairs travel.
    reads = tuple(value.name for value in state if value not in written or brings)
    stream, writes = "copy" if op.copies else "compute", tuple(value.name for value in written)
    return Launch(node.name, name, stream, reads, writes, brings=brings, reads_host=op.reads_host)


def schedule_of(graph_module: GraphModule) -> nx.DiGraph:
    """Two consecutive steps of a graph.

    Each launch is a node (step, name) with its `Launch`'s fields. The edges have a `kind`: order, launch or wait.
    """
    launches = [launch_of(node) for node in graph_module.graph.nodes if is_launch(node)]
    dag: nx.DiGraph = nx.DiGraph()
    newest: dict[str, Key] = {}  # of each stream
    fetches: dict[str, Key] = {}  # of each slots tensor
    for step in range(2):
        for launch in launches:
            key = step, launch.name
            dag.add_node(key, step=step, **vars(launch))
            if launch.stream in newest:
                dag.add_edge(newest[launch.stream], key, kind="order")
            if launch.stream == "copy" and "compute" in newest:
                dag.add_edge(newest["compute"], key, kind="launch")
            if launch.guards in fetches:
                dag.add_edge(fetches[launch.guards], key, kind="wait")
            # A correction's gather is on the copy stream, and the step waits for it.
            if (launch.reads_host or launch.op == "correct") and "copy" in newest:
                dag.add_edge(newest["copy"], key, kind="wait")
            newest[launch.stream] = key
            if launch.brings:
                fetches[launch.brings] = key
    return dag


def check_order(dag: nx.DiGraph) -> list[str]:
    """The unordered accesses: pairs of accesses to one state tensor, one of them a write, without a path from the
    earlier to the later. Empty when every slot read follows its fetch and every write its readers."""
    problems = []
    writer: dict[str, Any] = {}
    readers: dict[str, list[Any]] = {}
    for key, data in dag.nodes.items():  # in the order of the program
        behind = nx.ancestors(dag, key)
        for state in dict.fromkeys((*data["reads"], *data["writes"])):
            writes = state in data["writes"]
            earlier = [writer[state]] if state in writer else []
            for other in dict.fromkeys(earlier + (readers.get(state, []) if writes else [])):
                if other != key and other not in behind:
                    verb = "writes" if writes else "reads"
                    problems.append(f"step {key[0]}: {key[1]} {verb} {state} unordered after {other[1]} of {other[0]}")
            if writes:
                writer[state], readers[state] = key, []
            if state in data["reads"]:
                readers.setdefault(state, []).append(key)
    return problems
