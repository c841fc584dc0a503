"""SnapKV (arXiv 2404.14469): each KV head keeps the pairs that a prompt's last queries attend to, chosen once after an
exact prefill. All later pairs stay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specache_compile.caches.holding import sites_of
from specache_compile.options import option, whole

from .eviction import NewQueries
from .prompt_eviction import Prompt, PromptOptions, method_of


@dataclass(frozen=True)
class SnapKVOptions(PromptOptions):
    """The defaults are the paper's on LongBench."""

    method: str = "snapkv"
    window: int = whole(32, 1, "w: last queries of the prompt, which choose, and whose own pairs stay", metavar="W")
    kernel: int = option(
        7,
        lambda n: type(n) is int and n >= 1 and n % 2,
        "give an odd number of tokens, 1 or more",
        "neighbours over which a token's votes are pooled",
        type=int,
        metavar="TOKENS",
    )


def choose(prompt: Prompt, budget: int, window: int, kernel: int) -> Tensor:
    """The pairs of the window are kept, and the earlier pairs with the most votes. Among equals the oldest is evicted;
    pairs that the newest query does not see are evicted first.

    A pair's votes are its attention, summed over the window's queries, the most among `kernel` neighbours, so that a
    passage stays whole, averaged over the query group.
    """
    tokens = prompt.pairs.shape[2]
    return most_voted(*prompt.attention_of(tokens - min(window, budget), tokens), budget, kernel)


def most_voted(attention: Tensor, seen: Tensor, budget: int, kernel: int) -> Tensor:
    """The places [B, H, b] that `choose` keeps, from the window's attention [B, H, G, w, n] and what it sees."""
    tokens = attention.shape[4]
    before = tokens - attention.shape[3]
    votes = attention.sum(3)[..., :before]
    pooled = F.max_pool1d(votes.flatten(0, 1), kernel, stride=1, padding=kernel // 2).view(votes.shape).mean(2)
    order = pooled.masked_fill(~seen[:, :, -1, :before], -math.inf).argsort(dim=-1, stable=True)
    newest = torch.arange(before, tokens, device=attention.device).expand(*order.shape[:2], -1)
    return torch.cat([order[..., tokens - budget :].sort(dim=-1).values, newest], -1)


def chosen(cache: Any, queries: Sequence[Tensor], options: SnapKVOptions) -> Tensor:
    """The tokens [sites, B, H, b] that stay of a prompt without padding, for `hold_chosen`.

    cache: a plain one that has read the prompt.
    queries: `last_queries` of each layer, at least the window's.
    """
    return torch.stack(
        [stays(cache.layers[number].keys, queries[number], options) for number in sites_of(cache, options)]
    )


def stays(keys: Tensor, query: Tensor, options: SnapKVOptions) -> Tensor:
    """The places [B, H, b] of a prompt's pairs that stay, from its keys [B, H, n, d] and last queries [B, Hq, t, d]."""
    length, number = keys.shape[2], torch.arange(keys.shape[2], device=keys.device).expand(keys.shape[:3])
    if length <= (budget := options.budget_in_tokens(length)):
        return number
    window = min(options.window, budget)
    query = query[:, :, -window:].unflatten(1, (keys.shape[1], -1))
    last = NewQueries(query, None, None, None, length - window)
    return most_voted(*last.attention(slice(0, window), keys, number), budget, options.kernel)


METHOD = method_of("snapkv", SnapKVOptions, choose, ("window", "kernel"))
