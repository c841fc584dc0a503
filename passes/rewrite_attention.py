"""Each site with a past becomes a `specache::` op on its new pairs and its layer's tiers."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule

from .clean_up import drop_dead
from .context import Context, PassReport, Site, cursor_input, state_input, value_of

DECODE_STATE = ("codes", "key_params", "value_params", "recent", "slots", "slot_index")


def rewrite_attention(graph_module: GraphModule, context: Context) -> tuple[GraphModule, PassReport]:
    """Decode attends over the tiers, extend over the host tier; a prefill's attention is exact already.

    keys = cat([past_k, k], -2)        pair = specache.decode_attention(q, k, v, mask, ..., codes_0, ...)
    values = cat([past_v, v], -2)      out = pair[0]
    out = sdpa(q, keys, values)
    """
    if context.phase == "prefill":
        return graph_module, PassReport("rewrite_attention", {"rewritten": 0})
    for site in context.sites:
        replace_site(graph_module, context, site)
    drop_dead(graph_module, context)  # the held inputs go with their concatenations
    return graph_module, PassReport("rewrite_attention", {"rewritten": len(context.sites)})


def replace_site(graph_module: GraphModule, context: Context, site: Site) -> None:
    graph = graph_module.graph
    common = (site.q, site.k, site.v, site.mask, site.sinks, cursor_input(graph_module, context))
    fields = ("host",) if context.phase == "extend" else DECODE_STATE
    state = [state_input(graph_module, context, site.layer, field) for field in fields]
    with graph.inserting_before(site.attention):
        if context.phase == "extend":
            op = torch.ops.specache.extend_attention.default
            new = graph.call_function(op, (*common, *state, site.scale, site.softcap))
        else:
            op = torch.ops.specache.decode_attention.default
            pair = graph.call_function(op, (*common, *state, site.scale, site.softcap))
            new = graph.call_function(operator.getitem, (pair, 0))
    new.meta["example_value"] = value_of(site.attention)
    site.attention.replace_all_uses_with(new)
    graph.erase_node(site.attention)
    site.attention = new
