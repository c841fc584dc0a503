"""SnapKV (arXiv 2404.14469): of a prompt each KV head keeps what its last queries attend to, chosen once after an exact
prefill; whatever comes later stays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specache_compile.errors import OptionError
from specache_compile.kernels.attention.definition import BLOCK, grouped_bias
from specache_compile.kernels.costs import Arguments, Cost, Workload, bytes_of, elements, pair_bytes, size_of
from specache_compile.kernels.costs import rows as heads_of
from specache_compile.kernels.op import Op, fake_of_query
from specache_compile.kernels.state.cursor import LENGTH
from specache_compile.kernels.state.stored_tiers import EMPTY
from specache_compile.methods.field import Cropped, Field, LayerShape, LayerState, always
from specache_compile.methods.method import Method
from specache_compile.options import choice, option, whole
from specache_compile.passes.recipe import Call, Recipe

from .eviction import BudgetOptions, attention_over, drop_from, rows_of

POOLINGS: dict[str, Callable[..., Tensor]] = {"max": F.max_pool1d, "average": F.avg_pool1d}


def snapkv_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, cursor: Tensor, compressed: Tensor,
    compressed_token: Tensor, budget: int, window: int, kernel: int, pooling: str, scale: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Exact attention of T new tokens over the pairs that are kept and each other, which then join them. Of a prompt
    (nothing is cached before it) longer than the budget b, b stay: see `chosen`.

    q [B, Hq, T, d]; k, v [B, H, T, d]; mask [B|1, Hq|1, T|1, ≥ n + T] beside causality, column t is token t;
    sinks [Hq]. Mutates compressed [B, H, N, 2, d] and compressed_token int32 [B, H, N] (-1: empty), N at least b and
    what comes behind the prompt. A step that failed half way may be taken again. Returns [B, Hq, T, d] in q's dtype.
    """
    length, heads, tokens = int(cursor[LENGTH]), k.shape[1], k.shape[2]
    query = q.float().unflatten(1, (heads, -1)) * scale
    bias = None if mask is None else grouped_bias(mask, heads, length + tokens)
    sink = None if sinks is None else sinks.float().view(heads, -1, 1, 1)
    held = ((compressed_token >= 0) & (compressed_token < length)).sum(-1)  # [B, H]
    before = int(held.max())
    place = torch.arange(before, device=q.device)
    there = place < held.unsqueeze(-1)
    pairs = compressed[:, :, :before].masked_fill(~there[..., None, None], 0.0)
    new = torch.stack([k, v], dim=3)
    number = torch.arange(length, length + tokens, dtype=torch.int32, device=q.device).expand(*k.shape[:3])
    every = torch.cat([pairs, new], 2)
    token = torch.cat([compressed_token[:, :, :before].masked_fill(~there, EMPTY), number], 2)

    def attention_of(first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Of the new queries first..stop, over what is before the last of them."""
        keys, rows = slice(before + stop), slice(first, stop)
        return attention_over(query[:, :, :, rows], every[:, :, keys, 0], token[:, :, keys], length + first,
                              rows_of(bias, rows), sink, softcap)  # fmt: skip

    outputs = []
    for first in range(0, tokens, BLOCK):
        stop = min(tokens, first + BLOCK)
        attention, _ = attention_of(first, stop)
        outputs.append(
            (attention.flatten(2, 3) @ every[:, :, : before + stop, 1].float()).unflatten(2, (-1, stop - first))
        )
    if length == 0 and tokens > budget:
        window = min(window, budget)
        attention, seen = attention_of(tokens - window, tokens)
        stays = chosen(attention, seen[:, :, -1], budget, kernel, pooling)
        compressed_token.fill_(EMPTY)
        compressed[:, :, :budget] = every.gather(2, stays[..., None, None].expand(*stays.shape, *every.shape[3:]))
        compressed_token[:, :, :budget] = token.gather(2, stays)
    else:
        behind = held.unsqueeze(-1) + torch.arange(tokens, device=q.device)
        compressed.scatter_(2, behind[..., None, None].expand(new.shape), new)
        compressed_token.scatter_(2, behind, number)
    return torch.cat(outputs, 3).flatten(1, 2).to(q.dtype).contiguous()


def chosen(attention: Tensor, seen: Tensor, budget: int, kernel: int, pooling: str) -> Tensor:
    """The places [B, H, b] of the pairs that stay of a prompt of n, in their order: the w of the window, and of those
    before it the b - w that its queries' attention [B, H, G, w, n] votes for.

    A pair's votes are Σ attention over the window, pooled over `kernel` neighbours (an odd number) so that a passage
    stays whole, and averaged over the query group. seen bool [B, H, n]: what is not goes first. Of equals the oldest
    goes.
    """
    window, tokens = attention.shape[3:]
    before = tokens - window
    votes = attention.sum(3)[..., :before]
    pooled = POOLINGS[pooling](votes.flatten(0, 1), kernel, stride=1, padding=kernel // 2).view(votes.shape).mean(2)
    order = pooled.masked_fill(~seen[..., :before], -math.inf).argsort(dim=-1, stable=True)
    newest = torch.arange(before, tokens, device=attention.device).expand(*order.shape[:2], -1)
    return torch.cat([order[..., tokens - budget :].sort(dim=-1).values, newest], -1)


def cost(arguments: Arguments, load: Workload, site: int) -> Cost:
    """The kept pairs are read, the new ones join them."""
    q, k, pair = arguments["q"], arguments["k"], pair_bytes(load.options, load.layers[site])
    kept = min(load.options.budget_in_tokens(load.length), load.length)
    read = heads_of(load, site) * kept * (pair.exact + 4)
    return Cost(4 * elements(q) * (kept + size_of(k.shape[2])), read + 2 * bytes_of(q) + 4 * bytes_of(k))


ATTENTION = Op(
    "snapkv_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor cursor, "
    "Tensor(a!) compressed, Tensor(b!) compressed_token, int budget, int window, int kernel, str pooling, "
    "float scale, float? softcap) -> Tensor",
    snapkv_attention, fake_of_query, f"{__name__}:snapkv_attention",
    cost=cost, is_work=True, capturable=False,
)  # fmt: skip

# Prompts whose lengths lie in one step have graphs in common, and at most so many pairs of room too much.
STEP = 32


def check_kernel(name: str, value: Any) -> None:
    if type(value) is not int or value < 1 or value % 2 == 0:
        raise OptionError(f"option {name}={value!r}: give an odd number of tokens, 1 or more")


@dataclass(frozen=True)
class SnapKVOptions(BudgetOptions):
    """The defaults are the paper's on LongBench. prompt: a multiple of STEP at or below the prompt's tokens, by which
    the room for what comes later is known; a session sets it, and nobody else."""

    method: str = "snapkv"
    window: int = whole(32, 1, "w: last queries of the prompt, which choose, and whose own pairs stay", metavar="W")
    kernel: int = option(
        7, check_kernel, "neighbours over which a token's votes are pooled", type=int, metavar="TOKENS"
    )
    pooling: str = choice("max", tuple(POOLINGS), "how they are pooled")
    prompt: int = 0

    def for_prompt(self, tokens: int) -> SnapKVOptions:
        return replace(self, budget=self.budget_in_tokens(tokens), prompt=tokens - tokens % STEP)


def rows(options: SnapKVOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    """The budget, and room for all that comes behind the prompt."""
    return (batch, layer.heads, min(capacity, options.budget_in_tokens(capacity) + capacity - options.prompt))


def compressed_shape(options: SnapKVOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    return (*rows(options, layer, batch, capacity), 2, layer.head_dim)


def forget(state: LayerState, cropped: Cropped) -> None:
    drop_from(state["compressed_token"], cropped.length, state["compressed"])


COMPRESSED = Field("compressed", "kept", compressed_shape, on_crop=forget)
COMPRESSED_TOKEN = Field("compressed_token", "kept", rows, always(torch.int32), empty=EMPTY)
FIELDS = (COMPRESSED, COMPRESSED_TOKEN)


def recipe(options: SnapKVOptions, site: int) -> Recipe:
    settings = (options.budget_in_tokens(options.prompt), options.window, options.kernel, options.pooling)
    attend = Call("snapkv_attention", tuple(field.name for field in FIELDS), settings)
    return Recipe(dict.fromkeys(("prefill", "extend", "decode"), attend), ())


METHOD = Method("snapkv", SnapKVOptions, FIELDS, recipe)
