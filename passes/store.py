"""The new pairs go to the tiers: recent and low-bit on the device, and the host."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .context import Context, PassReport, cursor_input, output_node, state_input
from .in_place import take_writes


def store(graph_module: GraphModule, context: Context) -> tuple[GraphModule, PassReport]:
    """Append and offload each site's new pairs; of two lanes, only lane 0's. A pre-decode stores nothing.

        out = sdpa(q, k, v)                out = sdpa(q, k, v)
        return (logits, None, None)        specache.append(k, v, cursor, recent_0, codes_0, ...)
                                           specache.offload(k, v, cursor, host_0)

    The nodes stand at the end of the graph; `overlap` moves them to where they start earliest.
    """
    if context.phase == "pre-decode":
        take_writes(graph_module)
        return graph_module, PassReport("store", {"stored": 0})
    graph = graph_module.graph
    cursor = cursor_input(graph_module, context) if context.sites else None
    for site in context.sites:
        state = {
            name: state_input(graph_module, context, site.layer, name)
            for name in ("host", "recent", "codes", "key_params", "value_params")
        }
        with graph.inserting_before(output_node(graph_module)):
            k, v = (first_lane(graph_module, node, context.lanes) for node in (site.k, site.v))
            tiers = (state["recent"], state["codes"], state["key_params"], state["value_params"])
            graph.call_function(torch.ops.specache.append.default, (k, v, cursor, *tiers, context.zero_point))
            graph.call_function(torch.ops.specache.offload.default, (k, v, cursor, state["host"]))
    return graph_module, PassReport("store", {"stored": len(context.sites)})


def first_lane(graph_module: GraphModule, pair: Node, lanes: int) -> Node:
    """Lane 0 of [B, H, lanes, d]."""
    if lanes == 1:
        return pair
    node = graph_module.graph.call_function(torch.ops.aten.slice.Tensor, (pair, 2, 0, 1))
    node.meta["val"] = pair.meta["val"][:, :, :1]
    return node
