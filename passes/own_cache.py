"""Take the cached keys and values out of the graph's outputs."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from .plan import RewritePlan
from .reading.nodes import output_node
from .reading.sites import Part


def own_cache(graph_module: GraphModule, plan: RewritePlan) -> GraphModule:
    """Remove the concatenated keys and values from the outputs; the caller returns held tensors in their place.

        keys = cat([past_k, k], -2)        keys = cat([past_k, k], -2)
        out = sdpa(q, keys, values)        out = sdpa(q, keys, values)
        return (logits, keys, values)      return (logits, None, None)

    In a prefill the attention reads k itself, since there is no past to concatenate.
    """
    owned: dict[Node, tuple[int, Part]] = {}
    for site in plan.sites:
        owned[site.cat_k], owned[site.cat_v] = (site.number, "keys"), (site.number, "values")
    output = output_node(graph_module)
    outputs = list(output.args[0])  # type: ignore[arg-type]
    for position, value in enumerate(outputs):
        if isinstance(value, Node) and value in owned:
            plan.held_outputs[position] = owned[value]
            outputs[position] = None
    output.args = (tuple(outputs),)
    if not plan.phase.has_past:
        for site in plan.sites:
            site.cat_k.replace_all_uses_with(site.k)
            site.cat_v.replace_all_uses_with(site.v)
    return graph_module
