"""Run a prefill's attention with a flash kernel: causal, over KV heads that are not repeated."""

from __future__ import annotations

import torch.nn.functional as F
from torch.fx import GraphModule

from .plan import RewritePlan, replace_attention
from .reading.attention_forms import argument
from .reading.sites import Site


def causal_prefill(graph_module: GraphModule, plan: RewritePlan) -> GraphModule:
    """Replace an SDPA with a purely causal mask by one without a mask, over unrepeated KV heads.

        mask = le(arange(T), arange(T)[:, None])
        keys = reshape(expand(k[:, :, None]))
        out = sdpa(q, keys, values, mask)          out = sdpa(q, k, v, is_causal=True, enable_gqa=True)

    Flash kernels support no mask, and at 32k tokens one row's mask is a gigabyte. A padded prefill keeps its mask.
    """
    for site in () if plan.phase.has_past else plan.sites:
        if is_masked_sdpa(site):
            settings = {"dropout_p": 0.0, "is_causal": True, "scale": site.scale, "enable_gqa": True}
            with graph_module.graph.inserting_before(site.attention):
                given = (site.q, site.k, site.v)
                new = graph_module.graph.call_function(F.scaled_dot_product_attention, given, settings)
            replace_attention(graph_module, site, new)
    return graph_module


def is_masked_sdpa(site: Site) -> bool:
    """Return whether an SDPA call has a mask although its site is purely causal."""
    node = site.attention
    if node.target is not F.scaled_dot_product_attention or site.mask is not None or site.padding is not None:
        return False
    return argument(node, 3, "attn_mask") is not None
