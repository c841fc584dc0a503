"""Replace each site by the `specache::` op of the method's recipe, over its new pairs and its layer's state."""

from __future__ import annotations

import operator

from torch.fx import GraphModule

from .clean_up import clean_up
from .plan import RewritePlan, call_of, padding_input, replace_attention, session_input
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
        clean_up(graph_module, plan)  # drops the held inputs with their concatenations
    return graph_module


def replace_site(graph_module: GraphModule, plan: RewritePlan, site: Site, call: OpCall) -> None:
    if site.mask is None:
        site.mask = padding_input(graph_module, plan, site)
    given = {name: getattr(site, name) for name in ("q", "k", "v", "mask", "sinks", "scale", "softcap")}
    given["cursor"] = session_input(graph_module, plan, "cursor")
    with graph_module.graph.inserting_before(site.attention):
        new = call_of(graph_module, plan, site, call, given)
        if call.scores:
            new = graph_module.graph.call_function(operator.getitem, (new, 0))
    replace_attention(graph_module, site, new)
