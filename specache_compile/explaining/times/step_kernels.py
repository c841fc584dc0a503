"""A traced decode step as launches: those of its tier ops, its products, and what the compiler fuses between them.

Pointwise nodes with no launch between them are one launch. Its bytes are left out, because they are in a cache. A graph
of a few layers stands for one of many that are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.fx import GraphModule, Node

from specache_compile.kernels.op import Op, op_of
from specache_compile.passes.plan import tag_of
from specache_compile.passes.reading.nodes import arguments_of, hint, value_of

from .devices import Device
from .op_launches import COPY, LAUNCHES, MAIN, TAIL, Kernel, LaunchedOp, small
from .step_nodes import VIEWS, is_launch, layers_of, operator_name, weight_behind
from .workload import Workload, bytes_of, elements

# The speed of attention over a full cache as a share of long reads' speed, by bytes an element. Estimates.
ATTENDED = {2: 0.95, 1: 0.92}


@dataclass(frozen=True)
class Traced:
    """A decode step's rewritten graph, as one rank runs it.

    load: the trace's workload.
    weights: the model's bytes.
    layers: the model's number of layers where the graph has fewer; the others are like its middle one.
    """

    graph: GraphModule
    load: Workload
    weights: int
    layers: int | None = None


def is_captured(graph_module: GraphModule) -> bool:
    """Whether a CUDA graph may hold the step."""
    return all(op.capturable for node in graph_module.graph.nodes if (op := op_of(node.target)) is not None)


def launches_of(op: Op, call: LaunchedOp) -> list[Kernel]:
    """The launches of a tier op; a small one where `op_launches` does not list the op, such as another selector."""
    return LAUNCHES[op.name](call) if op.name in LAUNCHES else [small(op.name)]


def full_cache_launches(op: Op, call: LaunchedOp, itemsize: int) -> list[Kernel]:
    """Instead of a site's tier ops, an attention that reads a full cache of `itemsize` bytes an element once."""
    if not op.is_work or op.name == "attend_scored":
        return []
    read = call.heads * call.load.length * call.pair.exact * itemsize / call.layer.dtype.itemsize
    return [Kernel("attend", memory=read / ATTENDED[itemsize], tail=TAIL), small("merge")]


def kernels_of(traced: Traced, device: Device, length: int, batch: int, full: int = 0) -> list[Kernel]:
    """The launches of a step of that many tokens and rows, in the order of issue.

    full: bytes an element of a full cache that replaces the method's tiers; 0: none does.
    """
    load = replace(traced.load, length=length, batch=batch)
    layers, fused = layers_of(traced.graph), last_of_fused(traced.graph)
    newest = dict.fromkeys((MAIN, COPY), "")
    kernels = []
    for node in traced.graph.graph.nodes:
        if not is_launch(node):
            op, made = "fused", [small("fused")] if node in fused else []
        elif (tier_op := op_of(node.target)) is None:
            op, made = operator_name(node), [product(node, traced.load, load)]
        else:
            tag = tag_of(node)
            assert tag is not None, f"{node.name} is at no site"
            given = {name: value_of(x) if isinstance(x, Node) else x for name, x in arguments_of(node).items()}
            call = LaunchedOp(given, load, tag.site, device)
            op, made = tier_op.name, full_cache_launches(tier_op, call, full) if full else launches_of(tier_op, call)
        for number, kernel in enumerate(made):
            # So far waits name streams: each means the newest launch there. A launch on another stream starts after all
            # that the main stream issued before.
            streams = kernel.waits if kernel.stream == MAIN else (MAIN,)
            waits = tuple(newest[stream] for stream in streams if newest[stream])
            name = f"{node.name}.{number}.{kernel.name}"
            newest[kernel.stream] = name
            kernels.append(replace(kernel, name=name, op=op, layer=layers[node], waits=waits))
    return repeated(kernels, traced.layers)


def product(node: Node, traced: Workload, load: Workload) -> Kernel:
    """A matrix product, an exact attention or an embedding for the rows of `load`.

    Its weights are read once; all else is proportional to the rows.
    """
    name, rows, result = operator_name(node), load.batch / traced.batch, value_of(node)
    inputs = [value_of(argument) for argument in node.all_input_nodes]
    out = result if isinstance(result, Tensor) else next(each for each in result if isinstance(each, Tensor))
    if name == "embedding":
        return Kernel(name, memory=2 * bytes_of(out) * rows)
    found = filter(None, map(weight_behind, node.all_input_nodes))
    weights = float(sum(bytes_of(value_of(weight)) for weight in found))
    others = max(0.0, sum(map(bytes_of, inputs)) + bytes_of(out) - weights)  # a product may read a part of a weight
    factor = inputs[1 if name == "addmm" else 0]
    flops = 2 * elements(out) * hint(factor.shape[-1])
    if "grouped_mm" in name:  # a row reads its own experts'
        tokens, experts = elements(factor) / hint(factor.shape[-1]), hint(inputs[1].shape[0])
        weights *= min(1.0, tokens * rows / experts)
    if name == "scaled_dot_product_attention":
        tokens, seen = hint(factor.shape[2]), hint(inputs[1].shape[2])
        flops = (2 if tokens == seen and tokens > 1 else 4) * elements(factor) * seen  # half of it is causal
        rows *= load.length / traced.length if seen >= traced.length else 1
    return Kernel(name, memory=weights + others * rows, flops=flops * rows)


def last_of_fused(graph_module: GraphModule) -> set[Node]:
    """The last node of each group of pointwise nodes that is one launch: connected nodes behind as many launches."""
    depth: dict[Node, int] = {}
    group: dict[Node, Node] = {}

    def first(node: Node) -> Node:
        while group[node] is not node:
            node = group[node]
        return node

    for node in graph_module.graph.nodes:
        inputs = node.all_input_nodes
        depth[node] = max((depth[used] + is_launch(used) for used in inputs), default=0)
        if node.op not in ("call_function", "call_method") or is_launch(node) or not isinstance(value_of(node), Tensor):
            continue
        beside = [used for used in inputs if used in group and depth[used] == depth[node]]
        if operator_name(node) in VIEWS:
            if beside:  # what it is a view of
                group[node] = first(beside[0])
            continue
        group[node] = node
        for used in beside:
            group[first(used)] = node
    last = {first(node): node for node in group if operator_name(node) not in VIEWS}
    return set(last.values())


def repeated(kernels: Sequence[Kernel], layers: int | None) -> list[Kernel]:
    """The launches with the middle layer's repeated for all `layers` that were not traced."""
    numbers = sorted({kernel.layer for kernel in kernels} - {"before", "after"}, key=int)
    more = (layers or len(numbers)) - len(numbers)
    if more <= 0:
        return list(kernels)
    middle = numbers[len(numbers) // 2]
    own = [kernel for kernel in kernels if kernel.layer == middle]
    names, place = {kernel.name for kernel in own}, kernels.index(own[-1]) + 1
    copies = [
        replace(
            kernel, name=f"{kernel.name}+{number}", layer=f"{middle}+{number}",
            waits=tuple(f"{name}+{number}" if name in names else name for name in kernel.waits),
        )
        for number in range(more)
        for kernel in own
    ]  # fmt: skip
    return [*kernels[:place], *copies, *kernels[place:]]
