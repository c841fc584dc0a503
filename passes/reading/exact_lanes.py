"""Exact attentions in a widened graph: lane 1 must attend to lane 0's new pair."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .attention_forms import NoMatch, is_attention, match_form
from .find_attention import match_update
from .lane_rules import cat, first_lane, product


def show_first_lane(graph_module: GraphModule, lane: Node) -> int:
    """Let lane 1 of each exact attention attend to lane 0's new pair; returns the number of exact attentions.

        keys = cat([past_k, k], -2)        keys = cat([past_k, k], -2)
        out = sdpa(q, keys, values)        out = sdpa(q, keys, values)
        return (out, keys[:, :, -w:])      both = attend_after_first_lane(out, lane, q, keys[:, :, -w:], k, ...)
                                           return (both, keys[:, :, -w:])

    Under vmap each lane has only its own new key, so lane 1 would miss the token before it. Lane 0 keeps the result
    of Hugging Face's attention.
    """
    graph, shown = graph_module.graph, 0
    for attention in list(graph.nodes):
        if not is_attention(attention):
            continue
        try:
            form = match_form(attention)
            keys, values = match_update(form.keys), match_update(form.values)
        except NoMatch:
            continue  # lane 1's token may be worse; lane 0 stays exact
        pairs = (kept_of(keys.node), keys.new, kept_of(values.node), values.new)
        with graph.inserting_after(attention):
            both = graph.call_function(
                attend_after_first_lane,
                (attention, lane, form.q, pairs, form.mask, form.sinks, form.scale, form.softcap),
            )
        attention.replace_all_uses_with(both, delete_user_cb=lambda user, keep=both: user is not keep)
        shown += 1
    return shown


def kept_of(update: Node) -> Node:
    """Return the part of an update that the cache keeps: its newest tokens, or the whole update."""
    return next((user for user in update.users if any(after.op == "output" for after in user.users)), update)


def attend_after_first_lane(
    out: Tensor, lane: Tensor, q: Tensor, pairs: tuple[Tensor, Tensor, Tensor, Tensor], mask: Tensor | None,
    sinks: Tensor | None, scale: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Return `out` in lane 0; in lane 1, attention over lane 0's kept pairs and its own. Shapes as in `Form`, T = 1."""
    kept_k, k, kept_v, v = pairs
    group = q.shape[1] // k.shape[1]
    keys = cat([first_lane(kept_k), k], -2).repeat_interleave(group, 1)
    values = cat([first_lane(kept_v), v], -2).repeat_interleave(group, 1)
    tokens = keys.shape[-2]
    logits = product(q, keys.transpose(-1, -2)).float() * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if mask is not None:
        seen = cat([mask, mask[..., -1:]], -1)[..., -tokens:]
        logits = torch.where(seen, logits, -math.inf) if seen.dtype == torch.bool else logits + seen
    if sinks is not None:
        logits = cat([logits, sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)], -1)
    weights = logits.softmax(-1)[..., :tokens]
    return torch.where(lane == 0, out, product(weights.to(v.dtype), values).to(out.dtype))
