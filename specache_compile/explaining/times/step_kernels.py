"""A traced decode step as launches: those of its tier ops, its products, and what the compiler fuses between them.

Pointwise nodes with no launch between them are one launch. Its bytes are left out, because they are in a cache. A graph
of a few layers stands for one of many that are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.fx import GraphModule, Node

from specache_compile.kernels.op import Op, op_of
from specache_compile.passes.plan import tag_of
from specache_compile.passes.reading.nodes import is_weight, value_of

from .devices import Device
from .op_launches import COPY, LAUNCHES, MAIN, TAIL, Kernel, LaunchedOp, small
from .step_nodes import VIEWS, arguments_of, is_launch, layers_of, operator_name, product_cost
from .workload import Workload, bytes_of, elements, size_of

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

    def at(self, length: int, batch: int) -> Workload:
        """The load of that many tokens and rows."""
        return replace(self.load, length=length, batch=batch)


def is_captured(graph_module: GraphModule) -> bool:
    """Whether a CUDA graph may hold the step."""
    return all(op.capturable for node in graph_module.graph.nodes if (op := op_of(node.target)) is not None)


TierOp = Callable[[Op, LaunchedOp], list[Kernel]]


def over_tiers(op: Op, call: LaunchedOp) -> list[Kernel]:
    """The launches of a tier op; a small one where `op_launches` does not list the op, such as another selector."""
    return LAUNCHES[op.name](call) if op.name in LAUNCHES else [small(op.name)]


def full_cache(itemsize: int) -> TierOp:
    """Replaces a site's tier ops by an attention that reads a full cache of `itemsize` bytes an element once."""

    def attention(op: Op, call: LaunchedOp) -> list[Kernel]:
        if not op.is_work or op.name == "attend_scored":
            return []
        read = call.heads * call.load.length * call.pair.exact * itemsize / call.layer.dtype.itemsize
        return [Kernel("attend", memory=read / ATTENDED[itemsize], tail=TAIL), small("merge")]

    return attention


def kernels_of(traced: Traced, device: Device, length: int, batch: int, tiers: TierOp) -> list[Kernel]:
    """The launches of a step of that many tokens and rows, in the order of issue."""
    load = traced.at(length, batch)
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
            call = LaunchedOp(arguments_of(node), load, tag.site, device)
            op, made = tier_op.name, tiers(tier_op, call)
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
    (flops, moved), rows = product_cost(node), load.batch / traced.batch
    name, inputs = operator_name(node), [value_of(argument) for argument in node.all_input_nodes]
    weights = 0.0 if name == "embedding" else float(sum(map(weight_bytes, node.all_input_nodes)))
    before = now = weights
    if "grouped_mm" in name:  # a row reads its own experts'
        tokens, experts = elements(inputs[0]) / size_of(inputs[0].shape[-1]), size_of(inputs[1].shape[0])
        before, now = (weights * min(1.0, count / experts) for count in (tokens, tokens * rows))
    if name == "scaled_dot_product_attention" and size_of(inputs[1].shape[2]) >= traced.length:
        rows *= load.length / traced.length
    return Kernel(name, memory=now + max(0.0, moved - before) * rows, flops=flops * rows)


def weight_bytes(node: Node) -> int:
    """Bytes of a weight, or of its transpose; 0 for any other node."""
    while len(node.all_input_nodes) == 1 and operator_name(node) in VIEWS:
        node = node.all_input_nodes[0]
    return bytes_of(value_of(node)) if is_weight(node) else 0


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
