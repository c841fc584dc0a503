"""Store the new pairs in the tiers: window and low-bit tier on the device, and the host tier."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .plan import RewritePlan, call_of, padding_input, session_input
from .reading.nodes import output_node


def store(graph_module: GraphModule, plan: RewritePlan) -> GraphModule:
    """Insert the recipe's store calls for each site's new pairs. Only lane 0 is stored; a pre-decode stores nothing.

        out = sdpa(q, k, v)                out = sdpa(q, k, v)
        return (logits, None, None)        specache.append(k, v, padding, cursor, codes_0, ..., recent_0, ...)
                                           specache.offload(k, v, padding, cursor, host_0)

    The calls go to the end of the graph; `overlap` moves them to their earliest start.
    """
    if not plan.phase.stores:
        return graph_module
    graph = graph_module.graph
    cursor = session_input(graph_module, plan, "cursor") if plan.sites else None
    for site in plan.sites:
        padding = padding_input(graph_module, plan, site)
        with graph.inserting_before(output_node(graph_module)):
            k, v = (first_lane(graph_module, node, plan.lanes) for node in (site.k, site.v))
            for call in plan.recipe(site.number).stores:
                call_of(graph_module, plan, site, call, {"k": k, "v": v, "padding": padding, "cursor": cursor})
    return graph_module


def first_lane(graph_module: GraphModule, pair: Node, lanes: int) -> Node:
    """Return lane 0 of [B, H, lanes, d]."""
    if lanes == 1:
        return pair
    node = graph_module.graph.call_function(torch.ops.aten.slice.Tensor, (pair, 2, 0, 1))
    node.meta["val"] = pair.meta["val"][:, :, :1]
    return node
