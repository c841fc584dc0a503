"""Detect decode graphs whose result does not depend on token positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import GraphModule, Node

from specache_compile.passes.clean_up import writes

from .nodes import arguments_of, reached, value_of

# Operands of an attention op that are computed from the token.
OWN = ("q", "k", "v")


def has_no_positions(graph_module: GraphModule, ids: Node) -> bool:
    """Return whether a token's values depend only on token ids and the cache (Jamba, Nemotron-H, Granite's hybrids).

    Positions enter as integers or sizes. They do not count if they only reach attentions' masks, lengths and tiers as
    integers or booleans; a floating-point mask may be a bias by distance.
    """
    batch = value_of(ids).shape[0]
    sources = [node for node in graph_module.graph.nodes if node is not ids and may_be_position(node, batch)]
    followed = reached(sources, lambda node: (user for user in node.users if not is_attention_op(user)))
    return not any(takes_position(user, node) for node in [*sources, *followed] for user in node.users)


def takes_position(user: Node, node: Node) -> bool:
    """Return whether a node that may be a position gets out of the graph, or into what an attention computes."""
    if is_attention_op(user):
        return any(node is argument and decides(name, node) for name, argument in arguments_of(user).items())
    return user.op == "output" or writes(user)


def may_be_position(node: Node, batch: Any) -> bool:
    """Return whether a node is an integer or boolean input, or a size that depends on more than the number of rows."""
    value = value_of(node)
    if isinstance(value, Tensor):
        return node.op == "placeholder" and not value.is_floating_point()
    return not symbols_of(value) <= symbols_of(batch)


def symbols_of(size: Any) -> set[Any]:
    return set(size.node.expr.free_symbols) if isinstance(size, SymInt) else set()


def is_attention_op(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "specache"


def decides(name: str, node: Node) -> bool:
    """Return whether an attention op's argument can change a token's values by its position."""
    value = value_of(node)
    return name in OWN or (name == "mask" and isinstance(value, Tensor) and value.is_floating_point())
