"""Classify an attention mask by evaluating its part of the graph at a few sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.fx.node import map_aggregate

from specache_compile.kernels.attention.query import SEEN

from .in_place import memory_of, mutated
from .nodes import called_name, hint, reached, value_of

# Numbers of cached and new tokens at which a mask is evaluated: small, and distinct.
PAST, NEW = 5, 3
# Margin above every integer in the subgraph (such as a window), and the largest evaluated mask.
MARGIN, MOST_ELEMENTS = 7, 1 << 26
# Arithmetic that hides a window from the subgraph's integers, for example 16 blocks of 64 tokens.
ARITHMETIC = ("mul", "div", "truediv", "true_divide", "floordiv", "floor_divide", "mod", "remainder", "pow", "lshift",
              "rshift", "bitwise_left_shift", "bitwise_right_shift", "square")  # fmt: skip


class Unreadable(Exception):
    """A mask that is too large, or computed from more than compared positions and a padding mask [B, n]."""


def read_mask(mask: Node) -> tuple[bool, Node | None]:
    """Return whether a mask [B|1, Hq|1, T, n] is causal, and the input padding [B, n] (0: padding) that it also hides.

        q = arange(T) + past; kv = arange(n)
        mask = (kv[None, :] <= q[:, None]) & padding[:, None, None, kv]    →    (True, padding)

    transformers 5.17 to 5.22 computes a causal mask in every graph; later versions do so for a padded batch. A sliding
    window is causal until the window is full, so the mask is also evaluated at sizes above every integer in its
    subgraph.
    """
    try:
        nodes = subgraph(mask)
        check_readable(nodes)
        padding = padding_of(nodes)
        for sizes in scenes(mask, padding, nodes):
            if not agrees(evaluate(mask, nodes, sizes, padding), sizes, mask, padding):
                return False, None
    except Unreadable:
        return False, None
    return True, padding


def subgraph(mask: Node) -> list[Node]:
    """Return the tensor nodes that a mask depends on, in the graph's order; sizes need no nodes."""
    found = {mask, *reached([mask], lambda at: (x for x in at.all_input_nodes if isinstance(value_of(x), Tensor)))}
    return [node for node in mask.graph.nodes if node in found]


def check_readable(nodes: list[Node]) -> None:
    """Require that no tensor is mutated, and that no arithmetic on positions hides the width of a window."""
    memory = {memory_of(node) for node in nodes} - {None}
    if any(memory_of(target) in memory for node in nodes[0].graph.nodes for target in mutated(node)):
        raise Unreadable
    for node in nodes:
        if called_name(node).strip("_") in ARITHMETIC and value_of(node).dtype != torch.bool:
            raise Unreadable


def padding_of(nodes: list[Node]) -> Node | None:
    """Return the only input that is not a size, a padding mask [B, n]; None if there is none."""
    inputs = [node for node in nodes if node.op not in ("call_function", "call_method")]
    if not inputs:
        return None
    if len(inputs) > 1 or inputs[0].op != "placeholder" or value_of(inputs[0]).dim() != 2:
        raise Unreadable
    return inputs[0]


Sizes = dict[Any, int]


def scenes(mask: Node, padding: Node | None, nodes: list[Node]) -> Iterator[Sizes]:
    """Yield values for the symbols: small ones, and values above the subgraph's largest constant (a window)."""
    constants = [abs(c) for node in nodes for c in whole_numbers(node)]
    for extra in (0, max(constants, default=0) + MARGIN):
        sizes: Sizes = {}
        rows, columns = value_of(mask).shape[2:]
        for size, value in ((rows, NEW + extra), (columns, PAST + extra)):
            for symbol in free_symbols(size):
                sizes.setdefault(symbol, value)
        # A constant batch of the mask or of its padding is the batch of both.
        batches = [value_of(node).shape[0] for node in (mask, padding) if node is not None]
        batch = max((size for size in batches if isinstance(size, int) and size > 1), default=2)
        for size in (*batches, *value_of(mask).shape):
            for symbol in free_symbols(size):
                sizes.setdefault(symbol, batch)
        if padding is not None:
            width = value_of(padding).shape[1]
            for symbol in free_symbols(width):
                sizes.setdefault(symbol, at(columns, sizes) + hint(width) - hint(columns))
        elements = torch.Size(at(size, sizes) for size in value_of(mask).shape).numel()
        if elements > MOST_ELEMENTS:
            raise Unreadable
        yield sizes


def whole_numbers(node: Node) -> list[int]:
    """Return the integers among a call's arguments and in its size arguments."""
    given = [value_of(argument) for argument in node.all_input_nodes]
    found = [int(n) for size in given if isinstance(size, torch.SymInt) for n in size.node.expr.atoms(sympy.Integer)]

    def look(value: Any) -> Any:
        if type(value) is int:
            found.append(value)
        return value

    map_aggregate((node.args, node.kwargs), look)
    return found


def at(size: Any, sizes: Sizes) -> int:
    """Evaluate a size with these values of its symbols."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    value = size.node.expr.subs(sizes)
    if not value.is_Integer:
        raise Unreadable
    return int(value)


def size_of(node: Node, sizes: Sizes) -> int:
    """Evaluate a node that is a size. Raises: Unreadable for any other node, such as a top-k's results."""
    if not isinstance(value_of(node), (int, torch.SymInt)):
        raise Unreadable
    return at(value_of(node), sizes)


def padding_at(padding: Node, sizes: Sizes) -> Tensor:
    """Return an example padding [B, n]: a hole in every row, and all rows but the first padded left."""
    batch, width = (at(size, sizes) for size in value_of(padding).shape)
    made = torch.ones(batch, width, dtype=value_of(padding).dtype, device="cpu")
    for row in range(batch):
        made[row, : min(row, width - 1)] = 0
    made[:, width // 2] = 0
    return made


def evaluate(mask: Node, nodes: list[Node], sizes: Sizes, padding: Node | None) -> Tensor:
    """Evaluate the mask at these sizes, on the CPU."""
    known: dict[Node, Any] = {}

    def given(value: Any) -> Any:
        if isinstance(value, Node):
            return known[value] if value in known else size_of(value, sizes)
        return torch.device("cpu") if isinstance(value, torch.device) else value

    for node in nodes:
        if node is padding:
            known[node] = padding_at(node, sizes)
            continue
        args, kwargs = map_aggregate(node.args, given), map_aggregate(node.kwargs, given)
        try:
            if node.op == "call_method":
                known[node] = getattr(args[0], node.target)(*args[1:], **kwargs)  # type: ignore[index]
            else:
                known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            raise Unreadable from error  # the graph does not support these sizes
    return known[mask]


def agrees(made: Tensor, sizes: Sizes, mask: Node, padding: Node | None) -> bool:
    """Return whether each new token sees exactly the real tokens up to itself."""
    rows, columns = (at(size, sizes) for size in value_of(mask).shape[2:])
    if made.shape[2:] != (rows, columns) or columns < rows:
        return False
    expected = torch.ones(rows, columns, dtype=torch.bool, device="cpu").tril(columns - rows)
    if padding is not None:
        there = padding_at(padding, sizes)[:, :columns] != 0
        if there.shape[1] != columns or len(there) not in (1, len(made)):
            return False
        expected = expected & there[:, None, None]
    seen = made if made.dtype == torch.bool else made > SEEN
    neutral = made.dtype == torch.bool or bool((made[seen] == 0).all())
    expected = expected.expand(seen.shape) if expected.dim() == 2 else expected
    return neutral and bool((seen == expected).all())
