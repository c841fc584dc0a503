"""Ask Dynamo for one graph that serves every batch size and length, the first time that it makes a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.pgo import FrameStateSizeEntry, auto_dynamic, auto_unset, process_automatic_dynamic
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.fx import Node

# The dimensions that differ between calls, by a tensor's number of dimensions: token ids, positions and masks [B, n];
# embeddings [B, T, width]; keys and values [B, H, n, d].
FREE_DIMS = {2: (0, 1), 3: (0, 1), 4: (0, 2)}


def free_sizes(placeholders: Sequence[Node], fakes: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Tell Dynamo which sizes of a graph's inputs calls differ in, and have it trace again where they were numbers.

    Dynamo takes the sizes that it sees first for constants, and makes a second graph when they change. So each phase,
    with a padding mask and without, would have a graph that serves one batch size alone; Dynamo makes eight at most.
    A size of 1 stays a number. So does one that the model needs as a number: what has been told is not asked for again.
    Dynamo is told where it keeps the sizes that a function was called with, so that further graphs of that function
    have those symbols in their first trace. The exception is the one by which a backend may ask for another trace.
    """
    if not torch._dynamo.config.automatic_dynamic_shapes:
        return
    told = [
        tell(node, fake.dim())
        for node, fake, value in zip(placeholders, fakes, inputs, strict=True)
        if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter) and has_numbers(node, fake)
    ]
    if any(told):
        # Dynamo compares its next way with what it has noted of this one; the next may be another: through a vmap, say,
        # over a size that is now a symbol.
        InstructionTranslator.current_tx().output.root_tx.speculation_log.clear()
        raise TensorifyScalarRestartAnalysis(restart_reason="specache: batch sizes and lengths are to be symbols")


def has_numbers(node: Node, fake: Tensor) -> bool:
    """Whether a dimension that calls differ in was traced as a number above 1, in an input that is not the model's."""
    argument = node.meta.get("grapharg")
    source = argument.source.guard_source if argument is not None else None
    if source is None or source.is_unspecialized_nn_module() or source.is_specialized_nn_module():
        return False  # a buffer
    sizes = [fake.shape[dim] for dim in FREE_DIMS.get(fake.dim(), ())]
    return any(isinstance(size, int) and size > 1 for size in sizes)


def tell(node: Node, dims: int) -> bool:
    """Tell Dynamo that an input's free dimensions are none of its constants; whether that was news."""
    translator = InstructionTranslator.current_tx().output.root_tx
    name = node.meta["grapharg"].source.name
    name = name() if callable(name) else name  # a method in older versions
    free = FREE_DIMS[dims]
    known = process_automatic_dynamic(translator, name, FrameStateSizeEntry())
    if all(known.is_size_dynamic(dim) for dim in free):
        return False
    sizes: tuple[Any, ...] = tuple(auto_dynamic if dim in free else auto_unset for dim in range(dims))
    process_automatic_dynamic(translator, name, FrameStateSizeEntry.make_size(sizes))
    return True
