"""Fetch, one step ahead, the pairs that the last lane's attention selects."""

from __future__ import annotations

import operator

from torch.fx import GraphModule, Node

from .plan import RewritePlan, call_of, call_op, session_input, state_input
from .reading.nodes import output_node

# The state tensors that a fetch takes.
FETCH_STATE = ("selected", "host", "slots", "slot_index", "fetched")


def prefetch(graph_module: GraphModule, plan: RewritePlan) -> GraphModule:
    """Select and fetch after a layer's attention; wait before the next step's attention.

        pair = decode_attention(q, ...)    specache.wait(q, cursor, slots_0, slot_index_0)
        out = pair[0]                      pair = decode_attention(q, ...)
                                           specache.select_topk(pair[1], selected_0)
                                           specache.prefetch(selected_0, cursor, host_0, slots_0, ...)

    A wait takes the query as an operand, which orders it in any schedule, and `selected`, which the fetch reads.
    Selection and fetch go to the end of the graph, and each wait after its query; `overlap` then moves them.
    Without a speculative token, where each token corrects its own selection, nothing is fetched ahead.
    """
    if not (plan.phase.one_token and plan.sites and plan.selects):
        return graph_module
    graph = graph_module.graph
    cursor = session_input(graph_module, plan, "cursor")
    for site in plan.sites:
        selector = plan.recipe(site.number).selector
        if selector is None:
            continue
        state = {field: state_input(graph_module, plan, site.number, field) for field in FETCH_STATE}
        call: Node = site.attention.args[0]  # type: ignore[assignment]
        after = site.q if site.q.op != "placeholder" else graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(after):
            call_op(graph_module, site, "wait", {"after": site.q, "cursor": cursor, **state})
        with graph.inserting_before(output_node(graph_module)):
            scores = graph.call_function(operator.getitem, (call, 1))
            call_of(graph_module, plan, site, selector, {"scores": scores})
            call_op(graph_module, site, "prefetch", {"cursor": cursor, **state})
    return graph_module
