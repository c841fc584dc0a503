"""Let decode steps of latent attention read Hugging Face's cached latents; queries and output absorb the projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .clean_up import is_impure
from .reading.latents import Latents
from .reading.nodes import value_of


def absorb(graph_module: GraphModule, latents: tuple[Latents, ...]) -> tuple[Node, ...]:
    """Absorb the projection W = [W_k; W_v] where each row has one new token.

        both = linear(latents, W)                      query = einsum(q_nope, W_k)
        nope, values = split(both, [nope, v], -1)      scores = query · latentsᵀ + q_rope · ropesᵀ
        keys = cat([nope, ropes], -1)                  weights = softmax(scores · scale, mask)
        out = sdpa(q, keys, values, mask)              out = einsum(weights · latents, W_v)

    q·(W_k·c) = (q·W_k)·c, and Σ p·(W_v·c) = W_v·Σ p·c (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). So a step
    computes no key and no value of the cached tokens. Hugging Face's cache is unchanged.

    Graphs of several new tokens keep Hugging Face's form, in which one projection serves all new tokens. Their number
    is a symbol, so the compiler cannot decide whether absorbing costs less.

    Returns: the new attention nodes.
    """
    absorbed = []
    for each in (each for each in latents if each.is_decode):
        with graph_module.graph.inserting_before(each.attention):
            new = attend(each)
        new.meta["example_value"] = value_of(each.attention)
        each.attention.replace_all_uses_with(new)
        absorbed.append(new)
    if absorbed:
        graph_module.graph.eliminate_dead_code(is_impure_node=is_impure)
        graph_module.recompile()
    return tuple(absorbed)


def attend(latents: Latents) -> Node:
    """Insert the attention over latents [B, 1, n, rank] and their RoPE parts [B, 1, n, rope]; returns [B, Hq, 1, v]."""
    before, nope = latents.attention, latents.nope
    heads, width = (int(value_of(latents.q).shape[dim]) for dim in (1, 3))
    outputs = int(value_of(latents.attention).shape[3])
    projection = insert(before, torch.unflatten, latents.weight, 0, (heads, nope + outputs))
    keys = insert(before, torch.narrow, projection, 1, 0, nope)
    values = insert(before, torch.narrow, projection, 1, nope, outputs)
    query = insert(before, torch.narrow, latents.q, 3, 0, nope)
    turned = insert(before, torch.narrow, latents.q, 3, nope, width - nope)
    rows = insert(before, torch.squeeze, latents.latents, 1)
    ropes = insert(before, torch.squeeze, latents.ropes, 1)
    query = insert(before, torch.einsum, "bhtn,hnr->bhtr", query, keys)
    scores = insert(before, torch.einsum, "bhtr,bsr->bhts", query, rows)
    scores = insert(before, torch.add, scores, insert(before, torch.einsum, "bhtr,bsr->bhts", turned, ropes))
    weights = insert(before, softmax, scores, latents.mask, latents.scale)
    out = insert(before, torch.einsum, "bhts,bsr->bhtr", weights, rows)
    return insert(before, torch.einsum, "bhtr,hvr->bhtv", out, values)


def softmax(scores: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax in float32 of scores [B, Hq, 1, n]; mask [B|1, Hq|1, 1, n], bool (True: seen) or additive."""
    logits = scores.float() * scale
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    return torch.softmax(logits, -1, torch.float32).to(scores.dtype)


def insert(before: Node, function: Callable[..., Any], *arguments: Any) -> Node:
    """Insert a call of a function, with its fake value, at the graph's insertion point."""
    node = before.graph.call_function(function, arguments)
    values = torch.fx.map_arg(arguments, value_of)
    with torch.no_grad(), value_of(before).fake_mode:
        node.meta["example_value"] = function(*values)
    return node
