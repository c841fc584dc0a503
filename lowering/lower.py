"""Lower a rewritten graph to a callable: through Inductor, or run op by op."""

from __future__ import annotations

import copy
import functools
import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import GraphModule, Node

import specache_compile.kernels.ops
from specache_compile.compat import CHECKS_BOUNDS_TOO_EARLY
from specache_compile.kernels.op import op_of
from specache_compile.passes.reading.masks import subgraph
from specache_compile.passes.reading.nodes import value_of

from .fold_layers import fold_layers
from .kept import kept_by_inductor

# By default Inductor moves a wait to right after its prefetch, so that nothing overlaps the copy.
KEEP_ORDER = {"reorder_for_locality": False}


class KeyOfOps(CustomGraphPass):
    """Changes no graph, and adds the ops' definitions to the keys of Inductor's cache.

    The cached code contains the shapes of the ops' results, but Inductor's key has only the ops' names.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        pass

    def uuid(self) -> str:
        return hash_of_ops()


@functools.cache
def hash_of_ops() -> str:
    """Return a hash of the files that declare the ops and the layout of their operands."""
    ops = Path(specache_compile.kernels.ops.__file__)
    files = [ops, ops.with_name("op.py"), *sorted(ops.with_name("state").glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def lower(
    graph_module: GraphModule, inputs: list[Any], how: str, patches: Mapping[str, Any], mode: str | None
) -> Callable[..., Any]:
    """Return a callable over `inputs` (fakes and symbolic integers, as in the placeholders).

    Args:
        how: "inductor"; "op by op", with the kernels that Inductor's code would call; "eager", with the ops'
            definitions.
        patches: Inductor config in addition to that of `mode`.
        mode: a torch.compile mode.
    """
    if how == "eager":
        graph_module.recompile()
        return graph_module
    own = GraphModule(graph_module, copy.deepcopy(graph_module.graph))  # reports show the unchanged original
    use_fused_kernels(own)
    if how == "op by op":
        return own
    if CHECKS_BOUNDS_TOO_EARLY:
        trust_indices(own)
    settings = dict(torch._inductor.list_mode_options(mode)) if mode else {}
    config = {**settings, **KEEP_ORDER, "post_grad_custom_post_pass": KeyOfOps(), **patches}

    def compile_part(part: GraphModule, part_inputs: list[Any]) -> Any:
        with kept_by_inductor():
            return compile_fx(part, part_inputs, config_patches=config)

    folded = fold_layers(own, inputs, compile_part)
    return compile_part(own, inputs) if folded is None else folded


def use_fused_kernels(graph_module: GraphModule) -> None:
    """On a CPU, replace ops by C++ kernels with the same schema and, except for rounding, the same results.

    This compiles the kernels here, under a progress line, instead of in the first step.
    """
    for node in graph_module.graph.nodes:
        op = op_of(node.target)
        if op is None or op.fused is None or devices_of(node) != {"cpu"}:
            continue
        node.target = getattr(torch.ops.specache, f"{op.name}_fused").default
        if op.library is not None:
            op.library(value_of(node.args[0]))
    graph_module.recompile()


def devices_of(node: Node) -> set[str]:
    """Return the device types of a node's arguments."""
    return {value.device.type for value in map(value_of, node.all_input_nodes) if isinstance(value, torch.Tensor)}


def trust_indices(graph_module: GraphModule) -> None:
    """Remove the bounds check where padding [B, n] is indexed by tensors that depend only on sizes.

        seen = getitem(padding, (rows, columns))      seen = _unsafe_index(padding, [rows, columns])

    Hugging Face indexes padding by `arange`. The C++ of torch 2.11 runs the check before it computes the index.
    """
    for node in graph_module.graph.nodes:
        if node.target not in (operator.getitem, torch.ops.aten.index.Tensor) or not isinstance(node.args[1], Sequence):
            continue
        source, indices = node.args
        padding = value_of(source).dim() == 2 and value_of(source).dtype == torch.bool
        if padding and all(isinstance(index, Node) and is_made_of_sizes(index) for index in indices):
            node.target, node.args = torch.ops.aten._unsafe_index.Tensor, (source, list(indices))
    graph_module.recompile()


def is_made_of_sizes(index: Node) -> bool:
    """Return whether an index is an integer tensor that depends on no input tensor."""
    value = value_of(index)
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.dtype == torch.bool:
        return False
    return all(node.op in ("call_function", "call_method") for node in subgraph(index))
