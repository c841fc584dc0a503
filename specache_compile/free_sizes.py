"""Ask Dynamo for one graph that serves every batch size and length, the first time that it makes a graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch.fx import Node

# The dimensions that differ between calls, by a tensor's number of dimensions: token ids, positions and masks [B, n];
# embeddings [B, T, width]; keys and values [B, H, n, d].
FREE_DIMS = {2: (0, 1), 3: (0, 1), 4: (0, 2)}


def free_sizes(placeholders: Sequence[Node], fakes: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Mark the sizes of a graph's inputs that calls differ in, and have Dynamo trace it again where they were numbers.

    Dynamo takes the sizes that it sees first for constants, and makes a second graph when they change: for each phase,
    with a padding mask and without, a graph that serves one batch size alone, of the eight that it will make. A size
    of 1 stays a number; so does one that the model needs as such: an input that is marked already is not asked for
    again. The exception is the one by which a backend may ask for another trace.
    """
    if not torch._dynamo.config.automatic_dynamic_shapes:
        return
    asked = False
    for value, dim in numbers(placeholders, fakes, inputs):
        if dim not in getattr(value, "_dynamo_weak_dynamic_indices", ()):
            torch._dynamo.maybe_mark_dynamic(value, dim)
            asked = True
    if asked:
        raise TensorifyScalarRestartAnalysis(restart_reason="specache: batch sizes and lengths are to be symbols")


def numbers(placeholders: Sequence[Node], fakes: Sequence[Any], inputs: Sequence[Any]) -> Iterator[tuple[Tensor, int]]:
    """The inputs of the caller's, not the model's, and the dimensions of them that were traced as a number above 1."""
    for node, fake, value in zip(placeholders, fakes, inputs, strict=True):
        if not isinstance(value, Tensor) or isinstance(value, torch.nn.Parameter) or is_of_the_model(node):
            continue
        for dim in FREE_DIMS.get(value.dim(), ()):
            if isinstance(fake.shape[dim], int) and fake.shape[dim] > 1:
                yield value, dim


def is_of_the_model(node: Node) -> bool:
    """Whether Dynamo found an input in the model: a buffer."""
    argument = node.meta.get("grapharg")
    source = argument.source.guard_source if argument is not None else None
    return source is not None and (source.is_unspecialized_nn_module() or source.is_specialized_nn_module())
