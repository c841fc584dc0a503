"""One rank's part of a tensor-parallel model as a graph of plain tensors: what Dynamo captured of it has DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from specache_compile.passes.clean_up import writes

from .in_place import memory_of
from .nodes import output_node, value_of

# Of an input that holds a rank's part: the shape of the whole, in its node's meta.
WHOLE = "specache_whole"


def local_shards(graph_module: GraphModule) -> str | None:
    """Let the graph take this rank's parts in place of DTensors; returns why it cannot, None where there is no reason.

        x = from_local(ids, mesh, [Replicate()])       seen = (ids >= 64) & (ids < 128)
        out = embedding(x, weight)                     rows = embedding((ids - 64) * seen, weight)
        out = out.redistribute([Replicate()])          out = wait_tensor(all_reduce(rows * seen, "sum", "0"))
        out = out.to_local()
        y = linear(out, o_weight.to_local())           y = linear(out, o_weight)
        y.copy_(wait_tensor(all_reduce(y, ...)))       y_1 = wait_tensor(all_reduce(y, ...))

    What Hugging Face computes by DTensors, the look-up of a token and the gathering of logits, is traced to what each
    rank does for it. The rest of its graphs is plain already, so that attention reads as in one process, with fewer
    heads.
    """
    graph = graph_module.graph
    if not any(map(is_sharded, graph.nodes)):
        return None
    # What is written to is not what a write returns, and would go on without it.
    written = next((n for n in graph.nodes if writes(n) and any(map(is_sharded, n.all_input_nodes))), None)
    if written is not None:
        return f"a distributed tensor is written to in place ({written.name})"
    escaped = next(filter(is_sharded, output_node(graph_module).all_input_nodes), None)
    if escaped is not None:
        return f"a distributed tensor leaves the graph ({escaped.name}): a graph break within a sharded layer"
    for end in [node for node in graph.nodes if is_end(node)]:
        make_local(graph_module, end)
    for node in reversed(list(graph.nodes)):
        value = value_of(node)
        if isinstance(value, DTensor) and node.op == "placeholder":
            node.meta[WHOLE] = value.shape
            node.meta["example_value"] = local(value)
        elif is_sharded(node):
            graph.erase_node(node)
    for node in list(graph.nodes):
        take_sum(node)
    graph_module.recompile()
    return None


def local(value: Any) -> Any:
    """This rank's part of a DTensor; anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    with torch.no_grad():  # with gradients it would be a view, and a node of the graph of those
        return value.to_local()


def own_part(value: Any, fake: Any) -> Any:
    """What a graph takes of an argument whose fake is this: DTensors where it was left as it is."""
    return value if isinstance(fake, DTensor) else local(value)


def whole_shape(node: Node) -> torch.Size:
    """The shape of what a node holds, or holds a rank's part of."""
    shape: torch.Size = node.meta.get(WHOLE, value_of(node).shape)
    return shape


def is_sharded(node: Node) -> bool:
    """Whether what a node holds is a DTensor, or several."""
    value = value_of(node)
    return any(isinstance(part, DTensor) for part in (value if isinstance(value, (tuple, list)) else (value,)))


def is_end(node: Node) -> bool:
    """Whether a plain value comes of DTensors."""
    return any(map(is_sharded, node.all_input_nodes)) and not is_sharded(node)


def make_local(graph_module: GraphModule, end: Node) -> None:
    """Replace a plain value that comes of DTensors by what this rank does for it."""
    region, inputs = sharded_region(end)
    if region == [end] and len(inputs) == 1 and "to_local" in str(end.target):
        end.replace_all_uses_with(inputs[0])  # a weight's part, which the graph is given
        graph_module.graph.erase_node(end)
        return
    wholes = [value_of(node) for node in inputs]

    def compute(*parts: Any) -> Any:
        known = dict(zip(inputs, map(as_whole, parts, wholes), strict=True))
        for node in region:
            known[node] = call(node, known)
        return known[end]

    parts = [local(whole) for whole in wholes]
    fake_mode = next(part.fake_mode for part in parts if isinstance(part, FakeTensor))
    # Not the mode of the context that Dynamo has made for backends.
    with torch.no_grad(), tracing(TracingContext(fake_mode)), fake_mode:
        traced = make_fx(compute, {torch.ops.aten.index_put_.default: fill_masked})(*parts)
    for node in traced.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        if str(value_of(node).shape) == str(value_of(node.args[0]).shape):
            node.replace_all_uses_with(node.args[0])  # DTensors look at their parts so
    traced.graph.eliminate_dead_code()
    arguments = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with graph_module.graph.inserting_before(end):
        replacement = graph_module.graph.graph_copy(traced.graph, arguments)
    end.replace_all_uses_with(replacement)
    graph_module.graph.erase_node(end)


def fill_masked(x: Tensor, indices: list[Tensor], values: Tensor, accumulate: bool = False) -> Tensor:
    """`x[mask] = number`, as DTensors blank out what is another rank's, for whatever lanes there will be."""
    mask, *others = indices
    if others or mask.dtype != torch.bool or values.dim() or accumulate:
        return NotImplemented
    return x.masked_fill_(mask[(..., *[None] * (x.dim() - mask.dim()))], values.item())


def sharded_region(end: Node) -> tuple[list[Node], list[Node]]:
    """The DTensors that a node comes of, itself at the end, in the graph's order; and what they are computed from."""
    region, todo = {end}, [end]
    inputs: dict[Node, None] = {}
    while todo:
        for before in todo.pop().all_input_nodes:
            if before.op == "placeholder" or not is_sharded(before):
                inputs[before] = None
            elif before not in region:
                region.add(before)
                todo.append(before)
    return [node for node in end.graph.nodes if node in region], list(inputs)


def as_whole(part: Any, whole: Any) -> Any:
    """The DTensor of a rank's part; of what was no DTensor, the part."""
    if not isinstance(whole, DTensor):
        return part
    placements, shape, stride = whole.placements, whole.shape, whole.stride()
    return DTensor.from_local(part, whole.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def call(node: Node, known: dict[Node, Any]) -> Any:
    """A node's call on the values that are known."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


def take_sum(node: Node) -> None:
    """A sum over ranks that is written over its parts becomes a value, as widening wants it."""
    if node.target != "copy_" or node.args[1].target not in targets_of("wait_tensor"):
        return
    parts, total = node.args
    sharing = [other for other in node.graph.nodes if memory_of(other) == memory_of(parts)]
    if parts.op == "placeholder" or set(sharing) != {parts, node}:
        return
    order = {other: number for number, other in enumerate(node.graph.nodes)}
    parts.replace_all_uses_with(total, delete_user_cb=lambda user: order[user] > order[node])
    node.replace_all_uses_with(total)
    node.graph.erase_node(node)


def targets_of(name: str) -> tuple[Any, Any]:
    """The two ways in which a graph names a functional collective."""
    packet = getattr(torch.ops._c10d_functional, name)
    return packet, packet.default
