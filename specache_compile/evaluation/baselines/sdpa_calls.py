"""Record the inputs of scaled_dot_product_attention in an uncompiled model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

from specache_compile.caches.holding import has_latents

# Queries of a prompt that `last_queries` keeps.
LAST = 64


class Watched(TorchFunctionMode):
    """Within it, `seen` is what `see` makes of each call of scaled_dot_product_attention: of its queries, keys and
    scale."""

    def __init__(self, see: Callable[[Tensor, Tensor, float], Tensor]) -> None:
        super().__init__()
        self.see = see
        self.seen: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is F.scaled_dot_product_attention:
            q, k = args[:2]
            self.seen.append(self.see(q, k, given.get("scale") or q.shape[-1] ** -0.5))
        return func(*args, **given)


def last_queries(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """The last queries, scaled, float32 [B, Hq, t, d], t at most LAST."""
    return q[:, :, -LAST:].float() * scale


def joined(seen: Sequence[Tensor], layers: int) -> list[Tensor]:
    """The last queries [B, Hq, t, d] of each layer of a prompt that was read in chunks, from those of all calls."""
    return [torch.cat(list(seen[layer::layers]), 2)[:, :, -LAST:].clone() for layer in range(layers) if seen]


def calls_once_a_layer(model: Any) -> bool:
    """Whether each layer has a cache of keys, and calls scaled_dot_product_attention once with them, without a bias."""
    config = model.config.get_text_config()
    own_keys = len(DynamicCache(config=config).layers) == config.num_hidden_layers and not has_latents(model)
    has_bias = getattr(config, "alibi", False)
    return own_keys and config._attn_implementation == "sdpa" and not has_bias
