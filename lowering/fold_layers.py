"""Compile equal layers once: cut the graph at its layers' borders into regions that run in order.

A part holds the nodes between two borders, in `overlap`'s order. Each kind of layer (sliding window, full attention)
is a separate region.
"""

# embed; norm_0; q_0; ...; norm_1; q_1; ...; head      h, cos, sin = before(ids, table, ...)
#                                                       h = layer(h, cos, sin, weights and state of layer 0)
#                                                       h = layer(h, cos, sin, weights and state of layer 1)
#                                                       return after(h, head)

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg

from specache_compile.passes.reading.in_place import memory_of, mutated
from specache_compile.passes.reading.nodes import extract, output_node, value_of, weight_layer

# With fewer layers, or fewer saved compilations, the graph is compiled whole: a border prevents fusion across it.
FEWEST_LAYERS = 4
FEWEST_SAVED = 2

# Calls that change the mode of all later nodes, in any part, and of the caller.
SETS_A_MODE = (torch._C._set_grad_enabled, _enter_autocast, _exit_autocast)

Lowered = Callable[..., Sequence[Any]]
CompilePart = Callable[[GraphModule, list[Any]], Lowered]


@dataclass(frozen=True)
class GraphPart:
    """Adjacent nodes of a graph.

    sizes: nodes that compute the sizes of `nodes`.
    inputs: values from outside, for both.
    outputs: the values of `nodes` that are used outside.
    """

    sizes: tuple[Node, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


class Region(torch.nn.Module):
    """A compiled part, as a module that a graph can call."""

    def __init__(self, run: Lowered) -> None:
        super().__init__()
        self.run = run

    def forward(self, *inputs: Any) -> Sequence[Any]:
        return self.run(*inputs)


def fold_layers(graph_module: GraphModule, inputs: Sequence[Any], compile_part: CompilePart) -> GraphModule | None:
    """Compile a graph with one region for all equal layers.

    Args:
        inputs: fakes, as in the placeholders.

    Returns: a callable over the graph's inputs. None if too few layers are equal, or if cutting could change results.
    """
    mode = next((value.fake_mode for value in inputs if isinstance(value, FakeTensor)), None)
    parts = cut(graph_module)
    if mode is None or not parts or not may_be_cut(graph_module, parts):
        return None
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    values = dict(zip(placeholders, inputs, strict=True))
    kinds = kinds_of(graph_module, parts, values, mode)
    if kinds is None or len(kinds) - len(set(kinds)) < FEWEST_SAVED:
        return None
    names = {kind: f"region_{number}" for number, kind in enumerate(dict.fromkeys(kinds))}
    regions: dict[str, Region] = {}
    for part, kind in zip(parts, kinds, strict=True):
        if names[kind] not in regions:
            part_inputs = [values[node] for node in part.inputs]
            regions[names[kind]] = Region(compile_part(graph_of(graph_module, part, values), part_inputs))
    return in_order(graph_module, parts, [names[kind] for kind in kinds], regions)


def cut(graph_module: GraphModule) -> list[GraphPart]:
    """Return the part before the layers, each layer, and the part after them; [] for too few layers."""
    nodes = [node for node in body(graph_module) if not is_size(node)]
    kept = set(output_node(graph_module).all_input_nodes)
    returned = [node for node in body(graph_module) if is_size(node) and node in kept]
    borders = borders_of(nodes)
    if not borders:
        return []
    first, *pieces = (nodes[start:end] for start, end in zip([0, *borders], [*borders, len(nodes)], strict=True))
    return [part_of(piece) for piece in ([*returned, *first], *pieces) if piece]


def body(graph_module: GraphModule) -> list[Node]:
    return [node for node in graph_module.graph.nodes if node.op not in ("placeholder", "output")]


def borders_of(nodes: Sequence[Node]) -> list[int]:
    """Return the positions in `nodes` where each layer starts and where the last one ends.

    Names of weights determine a node's layer. Between the last weight of a layer and the first of the next, the border
    is where the fewest values cross: the residual stream. The outermost borders are placed relative to their
    neighbours, so that the outermost layers equal the others.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    newest = -1
    for place, node in enumerate(nodes):
        for layer in (n for n in map(weight_layer, node.all_input_nodes) if n is not None):
            if layer < newest:
                return []  # a later layer uses this layer's weights
            newest = layer
            first.setdefault(layer, place)
            last[layer] = place
    if len(first) < FEWEST_LAYERS:
        return []
    live = crossing(nodes)
    layers = list(first)
    if any(first[b] <= last[a] for a, b in itertools.pairwise(layers)):
        return []  # one node uses weights of two layers
    inner = [min(range(first[b], last[a], -1), key=live.__getitem__) for a, b in itertools.pairwise(layers)]
    start = first[layers[0]] - (first[layers[1]] - inner[0])
    end = last[layers[-1]] + (inner[-1] - last[layers[-2]])
    return [max(start, 0), *inner, min(end, len(nodes))]


def crossing(nodes: Sequence[Node]) -> list[int]:
    """Count, for each position, the earlier values that are used there or later."""
    place_of = {node: place for place, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 2)
    for place, node in enumerate(nodes):
        used = max((place_of.get(user, len(nodes)) for user in node.users), default=place)
        change[place + 1] += 1
        change[used + 1] -= 1
    live, count = [], 0
    for difference in change:
        count += difference
        live.append(count)
    return live


def part_of(nodes: Iterable[Node]) -> GraphPart:
    """Return a part that computes its own sizes, which Dynamo computes once, in the first layer."""
    own = dict.fromkeys(nodes)
    sizes: dict[Node, None] = {}
    for node in own:
        add_sizes(sizes, node)
    inside = {**sizes, **own}
    inputs = dict.fromkeys(used for node in inside for used in node.all_input_nodes if used not in inside)
    outputs = [node for node in own if any(user not in inside for user in node.users)]
    return GraphPart(tuple(node for node in sizes if node not in own), tuple(own), tuple(inputs), tuple(outputs))


def is_size(node: Node) -> bool:
    """Return whether a node computes with integers that are inputs or sizes of inputs."""
    value = value_of(node) if node.op in ("call_function", "call_method") else None
    # An unbacked size comes from a tensor's contents.
    if not isinstance(value, (int, torch.SymInt, torch.Size)) or free_unbacked_symbols(value):
        return False
    return all(used.op == "placeholder" or is_size(used) for used in node.all_input_nodes)


def add_sizes(sizes: dict[Node, None], node: Node) -> None:
    """Add the sizes that a node depends on, each after its inputs."""
    for used in node.all_input_nodes:
        if used not in sizes and is_size(used):
            add_sizes(sizes, used)
            sizes[used] = None


def may_be_cut(graph_module: GraphModule, parts: Sequence[GraphPart]) -> bool:
    """Return whether separately compiled parts compute the same as the whole graph.

    Only values may pass between parts. In-place writes, except to state, must stay within one part, and no view of
    state may cross a border.
    """
    written = set()
    for node in body(graph_module):
        if node.op == "get_attr" or node.target in SETS_A_MODE:
            return False
        written |= {memory_of(target) for target in mutated(node)}
    crossed = (node for part in parts for node in part.outputs)
    return not any(memory_of(node) in written - {None} for node in crossed)


def kinds_of(
    graph_module: GraphModule, parts: list[GraphPart], values: dict[Node, Any], mode: FakeTensorMode
) -> list[Any] | None:
    """Return a key for each part; parts with equal operations and input shapes have equal keys and share a region.

    Args:
        values: fakes of the graph's inputs. This adds the parts' outputs, computed once for each kind.

    Returns: the keys; None if parts exchange anything but tensors and integers of backed sizes.
    """
    made: dict[Any, tuple[Any, ...]] = {}
    kinds = []
    for number, part in enumerate(parts):
        whole = with_sizes(part, values)
        if whole is None:
            return None
        parts[number] = part = whole
        kind = kind_of(part, values)
        if kind not in made:
            with enable_python_dispatcher(), mode, torch.no_grad():  # the dispatcher handles symbolic sizes
                made[kind] = Interpreter(graph_of(graph_module, part, values)).run(*(values[n] for n in part.inputs))
        can_pass = all(isinstance(value, (Tensor, int, torch.SymInt)) for value in made[kind])
        if not can_pass or free_unbacked_symbols(made[kind]):
            return None
        # Separate objects: if two inputs were one object, AOTAutograd would read only the first.
        with mode, torch.no_grad():
            own = [value.detach() if isinstance(value, Tensor) else value for value in made[kind]]
        values.update(zip(part.outputs, own, strict=True))
        kinds.append(kind)
    return kinds


def with_sizes(part: GraphPart, values: dict[Node, Any]) -> GraphPart | None:
    """Add an input for each symbol that occurs only inside expressions of the inputs' sizes.

    A region must find its symbols in its inputs. None if no value of the graph equals such a symbol.
    """
    inputs = [sizes_of(values[node]) for node in part.inputs]
    missing = {symbol for sizes in inputs for size in sizes for symbol in size.free_symbols}.difference(*inputs)
    sources = dict.fromkeys(part.inputs)
    for symbol in sorted(missing, key=str):
        source = next((node for node, value in values.items() if symbol in sizes_of(value)), None)
        if source is None:
            return None
        sources[source] = None
    return dataclasses.replace(part, inputs=tuple(sources))


def sizes_of(value: Any) -> set[sympy.Expr]:
    """Return the symbolic sizes and strides of a tensor, or the symbolic integer itself."""
    sizes = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
    return {size.node.expr for size in sizes if isinstance(size, torch.SymInt)}


def kind_of(part: GraphPart, values: dict[Node, Any]) -> Any:
    """Describe a part's operations, with values numbered by first use."""
    nodes = (*part.sizes, *part.nodes)
    names: dict[Node, Any] = {node: f"node {number}" for number, node in enumerate((*part.inputs, *nodes))}
    calls = tuple((node.op, node.target, repr(map_arg((node.args, node.kwargs), names.__getitem__))) for node in nodes)
    inputs = tuple(description(values[node]) for node in part.inputs)
    return calls, inputs, tuple(names[node] for node in part.outputs)


def description(value: Any) -> tuple[Any, ...]:
    """Return the properties of an input that a compiled region depends on, with the graph's names of symbols."""
    if not isinstance(value, Tensor):
        return (str(value),)
    shape, stride = str(tuple(value.shape)), str(value.stride())
    return type(value), value.dtype, value.device, shape, stride, str(value.storage_offset()), value.requires_grad


def graph_of(graph_module: GraphModule, part: GraphPart, values: dict[Node, Any]) -> GraphModule:
    """Return a part as a separate graph, with the fakes of its inputs."""
    alone = extract(graph_module, part.inputs, (*part.sizes, *part.nodes), part.outputs)
    for placeholder, node in zip(alone.graph.find_nodes(op="placeholder"), part.inputs, strict=True):
        placeholder.meta["val"] = placeholder.meta["example_value"] = values[node]
    return alone


def in_order(graph_module: GraphModule, parts: Sequence[GraphPart], names: Sequence[str], regions: Any) -> GraphModule:
    """Return a graph with the inputs and outputs of `graph_module` that calls a region for each part.

    torch.fx frees each value after its last use.
    """
    graph = Graph()
    values = {node: graph.placeholder(node.name) for node in graph_module.graph.find_nodes(op="placeholder")}
    for part, name in zip(parts, names, strict=True):
        call = graph.call_module(name, tuple(values[node] for node in part.inputs))
        for place, node in enumerate(part.outputs):
            values[node] = graph.call_function(operator.getitem, (call, place))
    graph.output(map_arg(output_node(graph_module).args[0], values.__getitem__))
    return GraphModule(regions, graph)
