"""Fetch within the step what the token itself asks for, and the fetch ahead did not bring."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from .context import Context, PassReport, Site, call_op, state_input, value_of


def correct(graph_module: GraphModule, context: Context) -> tuple[GraphModule, PassReport]:
    """A decode attention in two halves, and between them lane 0's own choice of pairs.

        wait(q, cursor, slots_0, ...)            both = score_low_bit(q, k, ..., codes_0, key_params_0, recent_0, ...)
        pair = decode_attention(q, k, v, ...)    wait(q, cursor, slots_0, ...)
        out = pair[0]                            correct(both[1], missed, cursor, host_0, slots_0, ...)
                                                 out = attend_scored(q, k, v, ..., both[0], codes_0, ...)
        select_topk(pair[1], wanted_0)           select_topk(both[1][-1], wanted_0)

    The choice is of the low-bit logits alone, so that it does not depend on what is in the slots: a right guess leaves
    nothing to correct, a wrong one costs time and no quality. missed = guess != ids, where the recipe corrects a
    "miss" alone and there is a guess.
    """
    corrected = 0
    for site in context.sites if context.phase.stores and context.phase.one_token and context.selects else ():
        selector = context.recipe(site.number).selector
        if selector is not None and selector.correct != "never":
            missed = missed_of(graph_module, context) if selector.correct == "miss" else None
            split_attention(graph_module, context, site, missed)
            corrected += 1
    return graph_module, PassReport("correct", {"corrected": corrected})


def missed_of(graph_module: GraphModule, context: Context) -> Node | None:
    """bool [B, 1], made on first use: the rows whose guess was not the token that came. None: nobody guesses."""
    inputs = {node.name: node for node in graph_module.graph.find_nodes(op="placeholder")}
    if context.tokens is None or "guess" not in inputs:
        return None
    guess, ids = inputs["guess"], inputs[context.tokens]
    known = next((user for user in guess.users if user.target is torch.ops.aten.ne.Tensor), None)
    if known is not None:
        return known
    with graph_module.graph.inserting_after(list(inputs.values())[-1]):
        missed = graph_module.graph.call_function(torch.ops.aten.ne.Tensor, (ids, guess))
    missed.meta["val"] = torch.ne(value_of(ids), value_of(guess))
    return missed


def split_attention(graph_module: GraphModule, context: Context, site: Site, missed: Node | None) -> None:
    """`decode_attention` of one site becomes `score_low_bit`, `correct` and `attend_scored`."""
    graph = graph_module.graph
    call: Node = site.attention.args[0]  # type: ignore[assignment]
    q, k, v, mask, sinks, cursor, codes, key_params, value_params, recent, slots, slot_index, *settings = call.args
    host, corrected = (state_input(graph_module, context, site.number, field) for field in ("host", "corrected"))
    with graph.inserting_before(call):
        asked = (q, k, mask, sinks, cursor, codes, key_params, recent, *settings)
        both = call_op(graph_module, site, "score_low_bit", asked)
        logits, scores = (graph.call_function(operator.getitem, (both, part)) for part in (0, 1))
        call_op(graph_module, site, "correct", (scores, missed, cursor, host, slots, slot_index, corrected))
        given = (q, k, v, mask, sinks, cursor, logits, codes, value_params, recent, slots, slot_index, *settings)
        out = call_op(graph_module, site, "attend_scored", given)
        last = graph.call_function(torch.ops.aten.select.int, (scores, 0, -1))
    out.meta.update({key: value for key, value in site.attention.meta.items() if key != "specache"})
    for part in list(call.users):
        part.replace_all_uses_with(last if part.args[1] else out)
        graph.erase_node(part)
    graph.erase_node(call)
    site.attention = out
