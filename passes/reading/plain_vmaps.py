"""Replace a model's own `torch.vmap` by plain batched operations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch._C import _functorch
from torch._functorch import predispatch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from .nodes import extract, value_of


def plain_vmaps(graph_module: GraphModule) -> int:
    """Trace every vmapped stretch of a graph into plain operations; returns the number of stretches.

        _vmap_increment_nesting(n)                     unsqueeze = aten.unsqueeze(q, -1)
        one = _add_batch_dim(q, 0, 1)                  seen = aten.le(kv, unsqueeze)
        le = le(kv, one)
        seen = _remove_batch_dim(le, 1, n, 0)
        _vmap_decrement_nesting()

    Dynamo captures a vmap as calls that open and close a level. No data flow orders them, and their level numbers are
    wrong inside another vmap, so no later pass may drop, move or widen them.
    """
    stretches = list(vmapped(graph_module.graph))
    for stretch in stretches:
        make_plain(graph_module, stretch)
    if stretches:
        graph_module.recompile()
    return len(stretches)


def vmapped(graph: Graph) -> Iterator[list[Node]]:
    """Yield the nodes between the opening and the closing call of each outermost vmap."""
    stretch: list[Node] = []
    depth = 0
    for node in list(graph.nodes):
        depth += node.target is predispatch._vmap_increment_nesting
        if depth:
            stretch.append(node)
        depth -= node.target is predispatch._vmap_decrement_nesting
        if stretch and not depth:
            yield stretch
            stretch = []


def make_plain(graph_module: GraphModule, stretch: Sequence[Node]) -> None:
    graph, own = graph_module.graph, set(stretch)
    inputs = list(dict.fromkeys(node for inner in stretch for node in inner.all_input_nodes if node not in own))
    outputs = [node for node in stretch if not own.issuperset(node.users)]
    fakes = [value_of(node) for node in inputs]
    values = (value_of(node) for node in graph.nodes)
    modes = (value.fake_mode for value in values if isinstance(value, FakeTensor))
    with torch.no_grad(), levels_closed(), next(modes, contextlib.nullcontext()):
        traced = make_fx(Interpreter(extract(graph_module, inputs, stretch, outputs)).run)(*fakes)
    for node in traced.graph.find_nodes(op="get_attr"):
        move_constant(graph_module, traced, node)
    with graph.inserting_before(stretch[0]):
        arguments = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
        results = graph.graph_copy(traced.graph, arguments)
    for before, after in zip(outputs, results, strict=True):  # type: ignore[arg-type]
        before.replace_all_uses_with(after)
    for node in reversed(stretch):
        graph.erase_node(node)


@contextlib.contextmanager
def levels_closed() -> Iterator[None]:
    """Close all vmap levels that an error inside leaves open; later computations would run in them."""
    before = _functorch.maybe_current_level()
    try:
        yield
    finally:
        while _functorch.maybe_current_level() != before:
            predispatch._vmap_decrement_nesting()


def move_constant(graph_module: GraphModule, traced: GraphModule, node: Node) -> None:
    """Register a traced constant as a buffer of the graph, and rename its node."""
    number = sum(name.startswith("vmapped_constant") for name, _ in graph_module.named_buffers())
    value, name = getattr(traced, node.target), f"vmapped_constant_{number}"  # type: ignore[arg-type]
    graph_module.register_buffer(name, value)
    node.target, node.meta["val"] = name, value
