"""Replace each site by the `specache::` op of the method's recipe, over its new pairs and its layer's state."""

from __future__ import annotations

import operator

from torch.fx import GraphModule

from .clean_up import drop_dead
from .plan import (
    RewritePlan,
    call_by_name,
    call_op,
    frequencies_input,
    padding_input,
    replace_attention,
    session_input,
    state_input,
    with_tiers,
)
from .reading.sites import Site
from .recipe import OpCall


def rewrite_attention(graph_module: GraphModule, plan: RewritePlan) -> GraphModule:
    """Replace attentions of decodes and chunked prefills by tier ops; a prefill's attention is exact already.

    keys = cat([past_k, k], -2)        pair = specache.decode_attention(q, k, v, mask, ..., [codes_0, ...], ...)
    values = cat([past_v, v], -2)      out = pair[0]
    out = sdpa(q, keys, values)
    """
    calls = [(site, plan.recipe(site.number).attend.get(plan.phase.name)) for site in plan.sites]
    for site, call in calls:
        if call is not None:
            replace_site(graph_module, plan, site, call)
    if any(call is not None for _, call in calls):
        drop_dead(graph_module, plan)  # drops the held inputs with their concatenations
    return graph_module


def replace_site(graph_module: GraphModule, plan: RewritePlan, site: Site, call: OpCall) -> None:
    graph = graph_module.graph
    if site.mask is None:
        site.mask = padding_input(graph_module, plan, site)
    cursor = session_input(graph_module, plan, "cursor")
    state = {field: state_input(graph_module, plan, site.number, field) for field in call.state}
    pairs = {"q": site.q, "k": site.k, "v": site.v, "mask": site.mask, "sinks": site.sinks, "cursor": cursor}
    last = {"scale": site.scale, "softcap": site.softcap}
    named = with_tiers(call.op, state, call.settings)
    with graph.inserting_before(site.attention):
        if named is None:
            turned = frequencies_input(graph_module, plan, site, call)
            given = (*pairs.values(), *state.values(), *call.settings, *last.values(), *turned)
            new = call_op(graph_module, site, call.op, given)
        else:
            new = call_by_name(graph_module, site, call.op, {**pairs, **named, **last})
        if call.scores:
            new = graph.call_function(operator.getitem, (new, 0))
    replace_attention(graph_module, site, new)
