"""A lowered graph as plain data, and from data again in another process, without a pass and without Inductor.

    InOrder(regions)       ("in order", the regions' data, each once, and which of them each step calls)
    a compiled region      ("inductor", AOTAutograd's entry, with the code that Inductor wrote)
    a graph run by node    ("graph", its nodes, without what was known of their values)

Inductor's data name what it has compiled by a hash, which it finds in its own cache folder, or compiles again.
"""

from __future__ import annotations

import functools
import io
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import _get_qualified_name, map_aggregate

from .fold_layers import InOrder, Lowered, Step

# Whether what Inductor compiles from here on is to be kept: it must hold on to what it would forget.
_to_be_kept = False


class NotKeepable(Exception):
    """Why a lowered graph cannot be data."""


def keep_from_here_on(wanted: bool) -> None:
    global _to_be_kept
    _to_be_kept = wanted


def kept_by_inductor() -> AbstractContextManager[Any]:
    """Within it, what Inductor compiles can become data, if that was asked for."""
    return as_data() if _to_be_kept else nullcontext()


@contextmanager
def as_data() -> Iterator[None]:
    """A graph that calls functions of ours has no key among AOTAutograd's own files, and takes a random number for one.

    Dynamo gives `random` back the state that a trace found: without a seed of its own, the next graph would draw the
    same number, and be taken for this one.
    """
    state = random.getstate()
    random.seed()
    try:
        with torch._functorch.config.patch({"bundled_autograd_cache": True, "bypass_autograd_cache_key": True}):
            yield
    finally:
        random.setstate(state)


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
    callables = [lowered_from(region) for region in regions]
    return InOrder(tuple(Step(callables[number], *places) for number, *places in steps), made, results)


def nodes_of(graph_module: GraphModule) -> bytes:
    """A graph's nodes in their order, without what is known of their values."""
    for node in graph_module.graph.find_nodes(op="get_attr"):
        raise NotKeepable(f"the graph has a constant of its own, {node.target}")
    nodes = list(graph_module.graph.nodes)
    data = io.BytesIO()
    pickler = NodesPickler(data)
    pickler.numbers = {node: number for number, node in enumerate(nodes)}
    pickler.dump([(node.op, node.name, node.target, node.args, node.kwargs) for node in nodes])
    return data.getvalue()


def graph_from(nodes: bytes) -> Lowered:
    graph = Graph()
    made: list[Node] = []
    unpickler = NodesUnpickler(io.BytesIO(nodes))
    for op, name, target, args, kwargs in unpickler.load():
        given = map_aggregate((args, kwargs), lambda value: made[value.number] if isinstance(value, Place) else value)
        made.append(graph.create_node(op, target, *given, name=name))
    return GraphModule(torch.nn.Module(), graph)


@dataclass(frozen=True)
class Place:
    """A node, by its number among its graph's."""

    number: int


class NodesPickler(pickle.Pickler):
    """Pickles nodes by their numbers, and functions by where they are found."""

    numbers: dict[Node, int]

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Node):
            return "node", self.numbers[value]
        if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return "op", str(value)
        if isinstance(value, (FunctionType, BuiltinFunctionType)):
            name = _get_qualified_name(value)
            if function_named(name) is not value:
                raise NotKeepable(f"no import leads to {name}")
            return "function", name
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, torch.Tensor)):
            raise NotKeepable(f"the graph holds a {type(value).__name__}")
        return None


class NodesUnpickler(pickle.Unpickler):
    def persistent_load(self, found: tuple[str, Any]) -> Any:
        kind, what = found
        return Place(what) if kind == "node" else op_named(what) if kind == "op" else function_named(what)


def op_named(name: str) -> Any:
    """aten.add.Tensor → the overload."""
    value: Any = torch.ops
    for part in name.split("."):
        value = getattr(value, part)
    return value


def function_named(name: str) -> Any:
    """torch.nn.functional.linear → the function; None where no import leads to it."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            return functools.reduce(getattr, parts[cut:], import_module(".".join(parts[:cut])))
        except (ImportError, AttributeError):
            continue
    return None


def region_from(entry: bytes) -> Lowered:
    from torch._functorch._aot_autograd.aot_autograd_result import deserialize_bundled_cache_entry

    return deserialize_bundled_cache_entry(pickle.loads(entry))


FROM: dict[str, Callable[..., Lowered]] = {"in order": in_order_from, "graph": graph_from, "inductor": region_from}
