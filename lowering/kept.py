"""A lowered graph as plain data, and from data again in another process, without a pass and without Inductor.

    InOrder(regions)       ("in order", the regions' data, each once, and which of them each step calls)
    a compiled region      ("inductor", AOTAutograd's entry, with the code that Inductor wrote)
    a graph run by node    ("graph", its nodes, without what was known of their values)

Inductor's data name what it has compiled by a hash, which it finds in its own cache folder, or compiles again.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .fold_layers import InOrder, Lowered

# Whether what Inductor compiles from here on is to be kept: it must hold on to what it would forget.
_to_be_kept = False


class NotKeepable(Exception):
    """Why a lowered graph cannot be data."""


def keep_from_here_on(wanted: bool) -> None:
    global _to_be_kept
    _to_be_kept = wanted


def kept_by_inductor() -> AbstractContextManager[Any]:
    """Within it, what Inductor compiles can become data, if that was asked for."""
    return torch._functorch.config.patch(bundled_autograd_cache=True) if _to_be_kept else nullcontext()


def data_of(lowered: Lowered) -> tuple[Any, ...]:
    """A lowered graph as data that can be pickled; NotKeepable, with the reason, where it cannot."""
    if isinstance(lowered, InOrder):
        regions = list(dict.fromkeys(step.region for step in lowered.steps))
        numbers = {region: number for number, region in enumerate(regions)}
        steps = tuple((numbers[step.region], step.inputs, step.outputs, step.dead) for step in lowered.steps)
        return "in order", [data_of(region) for region in regions], steps, lowered.made, lowered.results
    if isinstance(lowered, GraphModule):
        return "graph", nodes_of(lowered)
    entry = getattr(lowered, "serialize", None)
    if entry is None:
        raise NotKeepable(f"{type(lowered).__name__} is neither a graph nor Inductor's")
    return "inductor", pickle.dumps(entry())


def lowered_from(data: Sequence[Any]) -> Lowered:
    """The callable whose data these are."""
    kind, *rest = data
    return FROM[kind](*rest)


def in_order_from(regions: Sequence[Any], steps: Sequence[Any], made: int, results: Any) -> Lowered:
    from .fold_layers import Step

    callables = [lowered_from(region) for region in regions]
    return InOrder(tuple(Step(callables[number], *places) for number, *places in steps), made, results)


def nodes_of(graph_module: GraphModule) -> bytes:
    from torch.fx._graph_pickler import GraphPickler, Options

    for node in graph_module.graph.find_nodes(op="get_attr"):
        raise NotKeepable(f"the graph has a constant of its own, {node.target}")
    graph = GraphModule(torch.nn.Module(), graph_module.graph)
    before = [(node, node.meta) for node in graph_module.graph.nodes]
    try:
        for node, _ in before:
            node.meta = {}
        return GraphPickler.dumps(graph, Options(ops_filter=None))
    finally:
        for node, meta in before:
            node.meta = meta


def graph_from(nodes: bytes) -> Lowered:
    from torch.fx._graph_pickler import GraphPickler

    graph_module = GraphPickler.loads(nodes, FakeTensorMode(shape_env=ShapeEnv()))
    assert isinstance(graph_module, GraphModule)
    graph_module.recompile()
    return graph_module


def region_from(entry: bytes) -> Lowered:
    from torch._functorch._aot_autograd.aot_autograd_result import deserialize_bundled_cache_entry

    return deserialize_bundled_cache_entry(pickle.loads(entry))


FROM: dict[str, Callable[..., Lowered]] = {"in order": in_order_from, "graph": graph_from, "inductor": region_from}
