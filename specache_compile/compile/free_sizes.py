"""Makes Dynamo compile one graph for every batch size and length, when it first compiles a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.pgo import FrameStateSizeEntry, auto_dynamic, auto_unset, process_automatic_dynamic
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.fx import Node

# Dimensions that differ between calls, by a tensor's number of dimensions: token ids, positions and masks [B, n];
# embeddings [B, T, width]; keys and values [B, H, n, d].
FREE_DIMS = {2: (0, 1), 3: (0, 1), 4: (0, 2)}


def free_sizes(placeholders: Sequence[Node], fakes: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Mark the sizes that differ between calls as dynamic, and make Dynamo trace again if some were constants.

    Dynamo treats the sizes of the first call as constants, and compiles a second graph when they change. Each phase,
    padded or not, would need a graph for one batch size alone. A size of 1 stays a constant, as does one that the model
    requires as such: each input is marked once. The marks are stored where Dynamo keeps the sizes of a function's
    calls, so further graphs have symbols at once. The exception is the one that lets a backend restart the trace.
    """
    if not torch._dynamo.config.automatic_dynamic_shapes:
        return
    marked = [
        mark_dynamic(node, fake.dim())
        for node, fake, value in zip(placeholders, fakes, inputs, strict=True)
        if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter) and has_numbers(node, fake)
    ]
    if any(marked):
        # Dynamo compares the next trace with the log of this one, but the next may differ: a size in a vmap is a symbol
        # now.
        InstructionTranslator.current_tx().output.root_tx.speculation_log.clear()
        raise TensorifyScalarRestartAnalysis(restart_reason="specache: batch sizes and lengths are to be symbols")


def has_numbers(node: Node, fake: Tensor) -> bool:
    """Whether an input that is no weight was traced with a constant above 1 in a dimension that differs
    between calls."""
    argument = node.meta.get("grapharg")
    source = argument.source.guard_source if argument is not None else None
    if source is None or source.is_unspecialized_nn_module() or source.is_specialized_nn_module():
        return False  # a buffer
    sizes = [fake.shape[dim] for dim in FREE_DIMS.get(fake.dim(), ())]
    return any(isinstance(size, int) and size > 1 for size in sizes)


def mark_dynamic(node: Node, dims: int) -> bool:
    """Mark an input's free dimensions as dynamic; whether they were not marked before."""
    translator = InstructionTranslator.current_tx().output.root_tx
    name = node.meta["grapharg"].source.name
    free = FREE_DIMS[dims]
    known = process_automatic_dynamic(translator, name, FrameStateSizeEntry())
    if all(known.is_size_dynamic(dim) for dim in free):
        return False
    sizes: tuple[Any, ...] = tuple(auto_dynamic if dim in free else auto_unset for dim in range(dims))
    process_automatic_dynamic(translator, name, FrameStateSizeEntry.make_size(sizes))
    return True
