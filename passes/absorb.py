"""Latent attention over the latents themselves: the projection is absorbed into queries and output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node

from .phase import EXTEND
from .plan import PassReport, Plan, replace_attention
from .reading.lane_rules import heads_times
from .reading.latents import Latents
from .reading.nodes import value_of
from .reading.sites import Site
from .recipe import OVER_LATENTS


def absorb(graph_module: GraphModule, plan: Plan) -> tuple[GraphModule, PassReport]:
    """A query asks for latents, and not for keys; the output is one of latents until all are summed.

        both = linear(cat([past, new]), weight)        query = cat([q_nope · W_k, q_rope], -1)
        keys, values = split(both, [nope, v], -1)      rows = cat([latents, ropes], -1)
        keys = cat([keys, ropes], -1)                  out = sdpa(query, rows, rows)
        out = sdpa(q, keys, values)                    out = out[..., :rank] · W_v

    q·(W_k·c) = (q·W_k)·c, and Σ p·(W_v·c) = W_v·Σ p·c (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): no key and no
    value of the past is made again. In a prefill, whose keys are all new, the attention stays as it is: there the
    product with the weight is the cheaper one. In an extend that depends on the number of tokens, and its op is given
    the weight (`rewrite_attention`). In every phase the new row, of latent and RoPE part, is what is kept.
    """
    absorbed = 0
    for site in plan.sites:
        if site.latents is not None:
            call = plan.recipe(site.number).attend.get(plan.phase.name)
            takes_weight = plan.phase is EXTEND and call is not None and call.op in OVER_LATENTS
            with graph_module.graph.inserting_before(site.attention):
                if plan.phase.has_past and not takes_weight:
                    attend_rows(graph_module, site, site.latents)
                    absorbed += 1
                else:
                    site.k = site.v = row_of(site.attention, site.k, site.v)
    return graph_module, PassReport("absorb", {"absorbed": absorbed})


def attend_rows(graph_module: GraphModule, site: Site, latents: Latents) -> None:
    """The site's attention over rows, behind the key half of the weight and before its value half."""
    before, rank = site.attention, latents.rank
    keys, values = (
        made(before, half, latents.weight, site.query_heads, latents.nope) for half in (key_half, value_half)
    )
    nope = made(before, channels, site.q, 0, latents.nope)
    turned = made(before, channels, site.q, latents.nope, None)
    query = made(before, torch.cat, [made(before, heads_times, nope, keys), turned], -1)
    rows = row_of(before, site.cat_k, site.cat_v)
    site.k = site.v = row_of(before, site.k, site.v)
    new = made(before, over_rows, query, rows, site.mask, site.scale)
    shared = made(before, channels, new, 0, rank)
    site.q = query
    replace_attention(graph_module, site, made(before, heads_times, shared, values))
    site.attention = new


def made(before: Node, function: Callable[..., Any], *arguments: Any) -> Node:
    """A call of a function, with the value that it has."""
    graph = before.graph
    node = graph.call_function(function, arguments)
    values = torch.fx.map_arg(arguments, value_of)
    with torch.no_grad(), detect_fake_mode(values) or contextlib.nullcontext():
        node.meta["example_value"] = function(*values)
    return node


def row_of(before: Node, latents: Node, ropes: Node) -> Node:
    return made(before, torch.cat, [latents, ropes], -1)


def channels(x: Tensor, start: int, stop: int | None) -> Tensor:
    return x[..., start:stop]


def key_half(weight: Tensor, heads: int, nope: int) -> Tensor:
    """[Hq, nope, rank] of the projection [Hq · (nope + v), rank]."""
    return weight.view(heads, -1, weight.shape[1])[:, :nope]


def value_half(weight: Tensor, heads: int, nope: int) -> Tensor:
    """[Hq, rank, v] of the projection."""
    return weight.view(heads, -1, weight.shape[1])[:, nope:].transpose(1, 2)


def over_rows(query: Tensor, rows: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of all heads to rows [B, 1, n, rank + rope]; `rewrite_attention` puts the recipe's op in its place."""
    return F.scaled_dot_product_attention(query, rows, rows, mask, scale=scale, enable_gqa=True)
