"""Replace the DTensors of a tensor-parallel model's graph by plain tensors: one rank's shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from specache_compile.passes.clean_up import writes

from .nodes import extract, output_node, reached, value_of


def local_shards(graph_module: GraphModule) -> str | None:
    """Let the graph take this rank's shards instead of DTensors; returns None, or the reason why that is impossible.

        x = from_local(ids, mesh, [Replicate()])       seen = (ids >= 64) & (ids < 128)
        out = embedding(x, weight)                     rows = embedding((ids - 64) * seen, weight)
        out = out.redistribute([Replicate()])          out = wait_tensor(all_reduce(rows * seen, "sum", "0"))
        out = out.to_local()
        y = linear(out, o_weight.to_local())           y = linear(out, o_weight)

    Hugging Face uses DTensors for the token embedding and for gathering logits. These are traced into each rank's
    operations. The rest of the graph has plain tensors already, so attention looks as in one process, with fewer heads.
    """
    graph = graph_module.graph
    if not any(map(is_sharded, graph.nodes)):
        return None
    # A write's result is another node than the written DTensor, whose readers would miss the write.
    written = next((n for n in graph.nodes if writes(n) and any(map(is_sharded, n.all_input_nodes))), None)
    if written is not None:
        return f"a distributed tensor is written to in place ({written.name})"
    escaped = next(filter(is_sharded, output_node(graph_module).all_input_nodes), None)
    if escaped is not None:
        return f"a distributed tensor leaves the graph ({escaped.name}): a graph break within a sharded layer"
    plain = (node for node in graph.nodes if not is_sharded(node))
    for end in [node for node in plain if any(map(is_sharded, node.all_input_nodes))]:
        make_local(graph_module, end)
    for node in reversed(list(graph.nodes)):
        value = value_of(node)
        if isinstance(value, DTensor) and node.op == "placeholder":
            node.meta["example_value"] = local(value)
        elif is_sharded(node):
            graph.erase_node(node)
    graph_module.recompile()
    return None


def local(value: Any) -> Any:
    """Return this rank's shard of a DTensor, or any other value unchanged."""
    if not isinstance(value, DTensor):
        return value
    with torch.no_grad():  # with gradients the shard would be a view in the autograd graph
        return value.to_local()


def own_part(value: Any, fake: Any) -> Any:
    """Return the argument for an input with this fake: the shard, or the DTensor if the graph was left alone."""
    return value if isinstance(fake, DTensor) else local(value)


def is_sharded(node: Node) -> bool:
    """Return whether a node's value has a DTensor."""
    value = value_of(node)
    return any(isinstance(part, DTensor) for part in (value if isinstance(value, (tuple, list)) else (value,)))


def make_local(graph_module: GraphModule, end: Node) -> None:
    """Replace a plain value computed from DTensors by this rank's operations."""
    region, inputs = sharded_region(end)
    if region == [end] and len(inputs) == 1 and "to_local" in str(end.target):
        end.replace_all_uses_with(inputs[0])  # a weight's shard, which is a graph input
        graph_module.graph.erase_node(end)
        return
    wholes = [value_of(node) for node in inputs]

    own = Interpreter(extract(graph_module, inputs, region, [end]))

    def compute(*parts: Any) -> Any:
        return own.run(*map(as_whole, parts, wholes))[0]

    parts = [local(whole) for whole in wholes]
    fake_mode = next(part.fake_mode for part in parts if isinstance(part, FakeTensor))
    # Use these fakes' mode, not the mode that Dynamo creates for backends.
    with torch.no_grad(), tracing(TracingContext(fake_mode)), fake_mode:
        traced = make_fx(compute, {torch.ops.aten.index_put_.default: fill_masked})(*parts)
    for node in traced.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        if str(value_of(node).shape) == str(value_of(node.args[0]).shape):
            node.replace_all_uses_with(node.args[0])  # DTensors take such views of their shards
    traced.graph.eliminate_dead_code()
    arguments = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with graph_module.graph.inserting_before(end):
        replacement = graph_module.graph.graph_copy(traced.graph, arguments)
    end.replace_all_uses_with(replacement)
    graph_module.graph.erase_node(end)


def fill_masked(x: Tensor, indices: list[Tensor], values: Tensor, accumulate: bool = False) -> Tensor:
    """Compute `x[mask] = number`, which masks other ranks' rows, without a tensor for the number."""
    mask, *others = indices
    if others or mask.dtype != torch.bool or values.dim() or accumulate:
        return NotImplemented
    return x.masked_fill_(mask[(..., *[None] * (x.dim() - mask.dim()))], values.item())


def sharded_region(end: Node) -> tuple[list[Node], list[Node]]:
    """Return the DTensor nodes that `end` depends on, in the graph's order and with `end` last; and their inputs."""

    def sharded(at: Node) -> list[Node]:
        return [before for before in at.all_input_nodes if before.op != "placeholder" and is_sharded(before)]

    found = {end, *reached([end], sharded)}
    region = [node for node in end.graph.nodes if node in found]
    inputs = dict.fromkeys(before for node in region for before in node.all_input_nodes if before not in found)
    return region, list(inputs)


def as_whole(part: Any, whole: Any) -> Any:
    """Return the DTensor of a rank's shard; a value that was no DTensor is unchanged."""
    if not isinstance(whole, DTensor):
        return part
    placements, shape, stride = whole.placements, whole.shape, whole.stride()
    return DTensor.from_local(part, whole.device_mesh, placements, run_check=False, shape=shape, stride=stride)
