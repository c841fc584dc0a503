"""Ask Dynamo for one graph that serves every batch size and length, the first time that it makes a graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch.fx import Node
from torch.utils.weak import WeakIdKeyDictionary

# The dimensions that differ between calls, by a tensor's number of dimensions: token ids, positions and masks [B, n];
# embeddings [B, T, width]; keys and values [B, H, n, d].
FREE_DIMS = {2: (0, 1), 3: (0, 1), 4: (0, 2)}
# Where `maybe_mark_dynamic` notes the dimensions, and in newer versions that there are any; and, for as long as Dynamo
# traces again, which of them are ours, and the first to go on a tensor.
MARKS, MARKED = "_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking"
_marked: WeakIdKeyDictionary = WeakIdKeyDictionary()


def free_sizes(placeholders: Sequence[Node], fakes: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Mark the sizes of a graph's inputs that calls differ in, and have Dynamo trace it again where they were numbers.

    Dynamo takes the sizes that it sees first for constants, and makes a second graph when they change: for each phase,
    with a padding mask and without, a graph that serves one batch size alone, of the eight that it will make. A size of
    1 stays a number; so does one that the model needs as such: an input that is marked already is not asked for again.
    The marks go when they have served: the tensors are the caller's, and Dynamo guards on marks. The exception is the
    one by which a backend may ask for another trace.
    """
    if not torch._dynamo.config.automatic_dynamic_shapes:
        return
    asked = False
    for value, dim in numbers(placeholders, fakes, inputs):
        if dim not in getattr(value, MARKS, ()):
            first = not hasattr(value, MARKED)
            torch._dynamo.maybe_mark_dynamic(value, dim)
            dims, was_first = _marked.get(value, (set(), False))
            _marked[value] = {*dims, dim}, first or was_first
            asked = True
    if not asked:
        take_marks(inputs)
    else:
        raise TensorifyScalarRestartAnalysis(restart_reason="specache: batch sizes and lengths are to be symbols")


def take_marks(inputs: Sequence[Any]) -> None:
    """Take the marks that `free_sizes` has put on the inputs off them."""
    for value in inputs:
        if not isinstance(value, Tensor) or value not in _marked:
            continue
        dims, first = _marked.pop(value)
        kept = getattr(value, MARKS) - dims
        if kept:
            setattr(value, MARKS, kept)
            continue
        delattr(value, MARKS)
        if first and hasattr(value, MARKED):
            delattr(value, MARKED)


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
