"""Fetch within the step what the token itself asks for, and the slots lack."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from .plan import PassReport, Plan, call_by_name, counted_input, state_input, tag_of
from .reading.nodes import arguments_of
from .reading.sites import Site


def correct(graph_module: GraphModule, plan: Plan) -> tuple[GraphModule, PassReport]:
    """A decode attention in two halves, and between them lane 0's own choice of pairs.

        wait(q, cursor, slots_0, ...)            asked = score_low_bit(q, k, ..., [codes_0, ...], ...)
        pair = decode_attention(q, k, v, ...)    wait(q, cursor, slots_0, ...)
        out = pair[0]                            chosen = correct(asked[2], cursor, host_0, slots_0, ...)
                                                 out = attend_scored(q, ..., asked[0], asked[1], chosen, ...)
        select_topk(pair[1], wanted_0)           select_topk(asked[2][-1], wanted_0)

    The choice is of the low-bit logits alone, so that it does not depend on what is in the slots: a right guess leaves
    nothing to correct, a wrong one costs time and no quality. The tokens of a widened decode share one choice, of what
    all of them give most together; those that a row is filled up with have no say.
    """
    if not (plan.phase.stores and plan.phase.over_tiers):
        return graph_module, PassReport("correct", {"corrected": 0})
    selectors = [(site, plan.recipe(site.number).selector) for site in plan.sites]
    corrected = [site for site, selector in selectors if selector is not None and selector.corrects]
    for site in corrected:
        split_attention(graph_module, plan, site)
    return graph_module, PassReport("correct", {"corrected": len(corrected)})


def split_attention(graph_module: GraphModule, plan: Plan, site: Site) -> None:
    """`decode_attention` of one site becomes `score_low_bit`, `correct` and `attend_scored`."""
    graph = graph_module.graph
    call: Node = site.attention.args[0]  # type: ignore[assignment]
    state = {name: state_input(graph_module, plan, site.number, name) for name in ("host", "corrected")}
    given = {**arguments_of(call), **state}
    counted = None if plan.phase.one_token else counted_input(graph_module, plan)
    # The hit rate, where it is measured, is of what is attended to.
    measures = graph.find_nodes(op="call_function", target=torch.ops.specache.measure.default)
    first = next((node for node in measures if (tag := tag_of(node)) is not None and tag.site == site.number), call)
    with graph.inserting_before(first):
        asked = call_by_name(graph_module, site, "score_low_bit", given)
        logits, base, scores = (graph.call_function(operator.getitem, (asked, part)) for part in range(3))
        chooser = scores
        if counted is not None:
            chooser = graph.call_function(torch.ops.aten.mul.Tensor, (scores, counted))
            chooser = graph.call_function(torch.ops.aten.sum.dim_IntList, (chooser, [0], True))
        chosen = call_by_name(graph_module, site, "correct", {**given, "scores": chooser})
    with graph.inserting_before(call):
        found = {"logits": logits, "base": base, "chosen": chosen}
        out = call_by_name(graph_module, site, "attend_scored", {**given, **found})
        last = graph.call_function(torch.ops.aten.select.int, (scores, 0, -1))
    out.meta.update({key: value for key, value in site.attention.meta.items() if key != "specache"})
    for part in list(call.users):
        part.replace_all_uses_with(last if part.args[1] else out)
        graph.erase_node(part)
    graph.erase_node(call)
    site.attention = out
