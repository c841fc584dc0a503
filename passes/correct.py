"""Fetch, within the step, the pairs that the token selects and that the slots lack."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from .plan import RewritePlan, call_op, state_input
from .reading.nodes import arguments_of
from .reading.sites import Site


def correct(graph_module: GraphModule, plan: RewritePlan) -> GraphModule:
    """Split a decode attention into two halves, with lane 0's selection of pairs between them.

        wait(q, cursor, slots_0, ...)            scored = score_low_bit(q, k, ..., [codes_0, ...], ...)
        pair = decode_attention(q, k, v, ...)    wait(q, cursor, slots_0, ...)
        out = pair[0]                            chosen = correct(scored[2], cursor, host_0, slots_0, ...)
                                                 out = attend_scored(q, ..., scored[0], scored[1], chosen, ...)
        select_topk(pair[1], selected_0)         select_topk(scored[2][-1], selected_0)

    The selection uses only low-bit logits, so it does not depend on the contents of the slots. A right speculative
    token leaves nothing to correct; a wrong one costs time and no accuracy.
    """
    if not (plan.phase.stores and plan.phase.one_token):
        return graph_module
    for site in plan.sites:
        if plan.recipe(site.number).corrects:
            split_attention(graph_module, plan, site)
    return graph_module


def split_attention(graph_module: GraphModule, plan: RewritePlan, site: Site) -> None:
    """Replace one site's `decode_attention` by `score_low_bit`, `correct` and `attend_scored`."""
    graph = graph_module.graph
    call: Node = site.attention.args[0]  # type: ignore[assignment]
    state = {name: state_input(graph_module, plan, site.number, name) for name in ("host", "corrected")}
    given = {**arguments_of(call), **state}
    with graph.inserting_before(call):
        # The next step's selection reads scores; a correction on a GPU does without them.
        ranked = any(part.args[1] == 1 and part.users for part in call.users)
        scored = call_op(graph_module, site, "score_low_bit", {**given, "scores": ranked})
        logits, base, scores = (graph.call_function(operator.getitem, (scored, part)) for part in range(3))
        kept = {"logits": logits, "base": base}
        chosen = call_op(graph_module, site, "correct", {**given, **kept, "scores": scores})
        out = call_op(graph_module, site, "attend_scored", {**given, **kept, "chosen": chosen})
        last = graph.call_function(torch.ops.aten.select.int, (scores, 0, -1)) if ranked else None
    out.meta.update({key: value for key, value in site.attention.meta.items() if key != "specache"})
    for part in list(call.users):
        part.replace_all_uses_with(last if part.args[1] else out)
        graph.erase_node(part)
    graph.erase_node(call)
    site.attention = out
