"""Eviction: each KV head keeps at most `budget` pairs on the device and forgets the rest (RoCo's framework, 003)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specache_compile.kernels.evict import HISTORY_SIZE
from specache_compile.passes.recipe import Call, Recipe

from .method import UNSELECTED, Method, Shapes

if TYPE_CHECKING:
    from specache_compile.options import Options
    from specache_compile.tiers import LayerShape

STATE = ("kept", "kept_token", "history")
# Between the random numbers of two sites' heads; any large odd number does.
SITE_STRIDE = 1_000_003


def shapes(options: Options, layer: LayerShape, batch: int, capacity: int) -> Shapes:
    """The kept pairs, their tokens, and what the policy has counted of them; nothing on the host."""
    rows = (batch, layer.heads, min(options.budget_in_tokens(capacity), capacity))
    return {
        "kept": ((*rows, 2, layer.head_dim), layer.dtype),
        "kept_token": (rows, torch.int32),
        "history": ((*rows, HISTORY_SIZE), torch.float32),
    }


def eviction(policy: str) -> Method:
    """The method that evicts by a policy of `kernels.policies`."""

    def recipe(options: Options, site: int) -> Recipe:
        settings = (policy, options.eviction_block, options.seed + SITE_STRIDE * site)
        attend = Call("budget_attention", STATE, settings)
        return Recipe(dict.fromkeys(("prefill", "extend", "decode"), attend), ())

    takes = ("budget", "eviction_block", "seed") if policy == "random" else ("budget", "eviction_block")
    return Method(policy, takes, shapes, recipe, UNSELECTED)
