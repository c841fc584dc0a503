"""Fetch within the step what the token itself asks for, and the slots lack."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from .context import Context, Input, PassReport, Site, add_input, call_op, state_input, tag_of, value_of


def correct(graph_module: GraphModule, context: Context) -> tuple[GraphModule, PassReport]:
    """A decode attention in two halves, and between them lane 0's own choice of pairs.

        wait(q, cursor, slots_0, ...)            asked = score_low_bit(q, k, ..., codes_0, key_params_0, ...)
        pair = decode_attention(q, k, v, ...)    wait(q, cursor, slots_0, ...)
        out = pair[0]                            chosen = correct(asked[2], missed, cursor, host_0, slots_0, ...)
                                                 out = attend_scored(q, ..., asked[0], asked[1], codes_0, ..., chosen)
        select_topk(pair[1], wanted_0)           select_topk(asked[2][-1], wanted_0)

    The choice is of the low-bit logits alone, so that it does not depend on what is in the slots: a right guess leaves
    nothing to correct, a wrong one costs time and no quality. Where the recipe corrects a "miss" alone, `missed` says
    in which rows the slots were chosen for another token than the one that came. The tokens of a widened decode share
    one choice, of what all of them give most together.
    """
    if not (context.phase.stores and context.phase.over_tiers):
        return graph_module, PassReport("correct", {"corrected": 0})
    selectors = [(site, context.recipe(site.number).selector) for site in context.sites]
    corrected = [(site, s.correct) for site, s in selectors if s is not None and s.correct != "never"]
    missed = missed_of(graph_module, context) if any(when == "miss" for _, when in corrected) else None
    for site, when in corrected:
        split_attention(graph_module, context, site, missed if when == "miss" else None)
    return graph_module, PassReport("correct", {"corrected": len(corrected)})


def missed_of(graph_module: GraphModule, context: Context) -> Node | None:
    """bool [B, 1]: the rows whose last guess, which the slots were chosen for, was not the token that came. None:
    nobody guesses."""
    if context.tokens is None:
        return None
    graph = graph_module.graph
    (ids,) = (node for node in graph.find_nodes(op="placeholder") if node.name == context.tokens)
    guessed = add_input(graph_module, context, "guessed", Input("guessed"), torch.empty_like(value_of(ids)))
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        other = graph.call_function(torch.ops.aten.ne.Tensor, (ids, guessed))
    with graph.inserting_after(other):
        chosen = graph.call_function(torch.ops.aten.ge.Scalar, (guessed, 0))
    with graph.inserting_after(chosen):
        missed = graph.call_function(torch.ops.aten.logical_and.default, (other, chosen))
    for node in (other, chosen, missed):
        node.meta["val"] = torch.empty_like(value_of(ids), dtype=torch.bool)
    return missed


def split_attention(graph_module: GraphModule, context: Context, site: Site, missed: Node | None) -> None:
    """`decode_attention` of one site becomes `score_low_bit`, `correct` and `attend_scored`."""
    graph = graph_module.graph
    call: Node = site.attention.args[0]  # type: ignore[assignment]
    q, k, v, mask, sinks, cursor, codes, key_params, value_params, center, recent, *rest = call.args
    slots, slot_index, *layout, _, scale, softcap = rest  # what is corrected has no need to be unbiased
    settings = (*layout, scale, softcap)
    host, corrected = (state_input(graph_module, context, site.number, field) for field in ("host", "corrected"))
    # The hit rate, where it is measured, is of what is attended to.
    measures = graph.find_nodes(op="call_function", target=torch.ops.specache.measure.default)
    first = next((node for node in measures if (tag := tag_of(node)) is not None and tag.site == site.number), call)
    with graph.inserting_before(first):
        given = (q, k, mask, sinks, cursor, codes, key_params, center, recent, *settings)
        asked = call_op(graph_module, site, "score_low_bit", given)
        logits, base, scores = (graph.call_function(operator.getitem, (asked, part)) for part in range(3))
        chooser = scores
        if not context.phase.one_token:
            chooser = graph.call_function(torch.ops.aten.sum.dim_IntList, (scores, [0], True))
        asking = (chooser, missed, cursor, host, slots, slot_index, corrected)
        chosen = call_op(graph_module, site, "correct", asking)
    with graph.inserting_before(call):
        tiers = (codes, value_params, recent, slots, slot_index, chosen)
        given = (q, k, v, mask, sinks, cursor, logits, base, *tiers, *settings)
        out = call_op(graph_module, site, "attend_scored", given)
        last = graph.call_function(torch.ops.aten.select.int, (scores, 0, -1))
    out.meta.update({key: value for key, value in site.attention.meta.items() if key != "specache"})
    for part in list(call.users):
        part.replace_all_uses_with(last if part.args[1] else out)
        graph.erase_node(part)
    graph.erase_node(call)
    site.attention = out
