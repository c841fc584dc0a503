"""Store a lowered graph as data, and load a callable from the data in another process, without passes and Inductor.

A region compiled by Inductor is stored as AOTAutograd's entry, with Inductor's code and a hash of its machine code.
Inductor loads the machine code from its cache folder, or compiles it. Other graphs are stored as torch.fx source.
"""

from __future__ import annotations

import functools
import os
import pickle
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from .fold_layers import Lowered

# Types of a node's arguments that torch.fx prints as source which evaluates to the same value.
PRINTED = (
    Node, bool, int, float, str, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip


class NotKeepable(Exception):
    """A lowered graph cannot be stored as data. The message is the reason."""


@contextmanager
def kept_by_inductor() -> Iterator[None]:
    """A context in which a graph that Inductor compiles can become data, where $SPECACHE_CACHE is set.

    AOTAutograd cannot hash graphs with custom callables and uses `random()` as the cache key. Dynamo restores the state
    of `random`, so this reseeds it to avoid equal keys.
    """
    if not os.environ.get("SPECACHE_CACHE"):
        yield
        return
    state = random.getstate()
    random.seed()
    try:
        with torch._functorch.config.patch({"bundled_autograd_cache": True, "bypass_autograd_cache_key": True}):
            yield
    finally:
        random.setstate(state)


def data_of(lowered: Lowered) -> tuple[Any, ...]:
    """Return a lowered graph as picklable data. Raises: NotKeepable, with the reason."""
    if isinstance(lowered, GraphModule):
        regions = {name: data_of(getattr(region, "run", region)) for name, region in lowered.named_children()}
        return "graph", regions, *source_of(lowered)
    entry = getattr(lowered, "serialize", None)
    if entry is None:
        raise NotKeepable(f"{type(lowered).__name__} is neither a graph nor Inductor's")
    return "inductor", pickle.dumps(entry())


def lowered_from(data: Sequence[Any]) -> Lowered:
    """Return the callable with these data."""
    kind, *rest = data
    if kind == "graph":
        regions, *source = rest
        return function_from({name: lowered_from(region) for name, region in regions.items()}, *source)
    from torch._functorch._aot_autograd.aot_autograd_result import deserialize_bundled_cache_entry

    return deserialize_bundled_cache_entry(pickle.loads(rest[0]))


def source_of(graph_module: GraphModule) -> tuple[str, dict[str, str], bytes]:
    """Return the source of a graph's function, its module globals by import path, and its other globals, pickled."""
    for node in graph_module.graph.nodes:
        map_aggregate((node.args, node.kwargs), check_printed)
        if node.op == "get_attr":
            raise NotKeepable(f"the graph has a constant, {node.target}")
    code = graph_module.graph.python_code("self")
    modules = {name: value.__name__ for name, value in code.globals.items() if isinstance(value, ModuleType)}
    others = {name: value for name, value in code.globals.items() if name not in modules}
    return code.src, modules, pickle.dumps(others)


def check_printed(argument: Any) -> None:
    if type(argument) not in PRINTED:
        raise NotKeepable(f"the graph holds a {type(argument).__name__}")


def function_from(regions: dict[str, Lowered], source: str, modules: dict[str, str], others: bytes) -> Lowered:
    scope = {**{name: import_module(path) for name, path in modules.items()}, **pickle.loads(others)}
    exec(source, scope)
    return functools.partial(scope["forward"], SimpleNamespace(**regions))
