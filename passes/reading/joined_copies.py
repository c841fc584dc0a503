"""Turn a tensor that is filled in place, part by part, into a concatenation."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .in_place import mutated
from .nodes import value_of


def joined_copies(graph_module: GraphModule) -> int:
    """Replace each empty tensor that copies fill along its last dimension by a concatenation; returns their number.

        keys = new_empty(x, B, H, n, 48)           keys = cat([nope, rope], -1)
        keys[..., :32].copy_(nope)
        keys[..., 32:].copy_(rope)

    Latent attention fills its keys this way. Nodes that write in place are never dead code, even if a rewrite leaves
    the keys unused.
    """
    found = 0
    for node in graph_module.graph.find_nodes(op="call_method", target="new_empty"):
        parts = parts_of(node)
        if parts is not None:
            join(node, parts)
            found += 1
    if found:
        graph_module.recompile()
    return found


def parts_of(empty: Node) -> list[Node] | None:
    """Return the `view.copy_(source)` calls that fill a tensor from left to right. None if it is filled in another way,
    or read before it is full."""
    users = sorted(empty.users)
    copies = [copy for user in users if (copy := copy_into(user, empty)) is not None]
    views: list[Any] = [copy.args[0] for copy in copies]
    ends = list(itertools.accumulate(value_of(view).shape[-1] for view in views))
    starts = [view.args[1][1].start or 0 for view in views]
    if starts != [0, *ends][: len(starts)] or ends[-1:] != [value_of(empty).shape[-1]]:
        return None
    early = any(user < max(copies) for user in users if user not in views)
    return None if early or writes_between(copies) else copies


def writes_between(copies: list[Node]) -> bool:
    """Return whether another write lies between the copies, which could change a source."""
    at, last = min(copies), max(copies)
    while at is not last:
        if at not in copies and mutated(at):
            return True
        at = at.next
    return False


def copy_into(view: Node, empty: Node) -> Node | None:
    """Return the only use of `empty[..., a:b]`, a copy of equal shape and dtype with an unused result; else None."""
    where = view.args[1] if len(view.args) == 2 else None
    plain = isinstance(where, tuple) and len(where) == 2 and where[0] is Ellipsis and isinstance(where[1], slice)
    if not plain or len(view.users) != 1 or not isinstance(where[1].start, int | None):  # type: ignore[index]
        return None
    (copy,) = view.users
    if copy.target != "copy_" or copy.args[0] is not view or copy.users:
        return None
    source, target = value_of(copy.args[1]), value_of(view)  # type: ignore[arg-type]
    fits = isinstance(source, Tensor) and source.shape == target.shape and source.dtype == value_of(empty).dtype
    return copy if fits else None


def join(empty: Node, copies: list[Node]) -> None:
    """Replace the tensor by the concatenation of the copies' sources."""
    graph = empty.graph
    with graph.inserting_after(max(copies)):
        joined = graph.call_function(torch.cat, ([copy.args[1] for copy in copies], -1))
    joined.meta["example_value"] = value_of(empty)
    for copy in copies:
        view: Node = copy.args[0]  # type: ignore[assignment]
        graph.erase_node(copy)
        graph.erase_node(view)
    empty.replace_all_uses_with(joined)
    graph.erase_node(empty)
