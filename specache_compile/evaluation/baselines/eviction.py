"""Eviction: each KV head keeps at most `budget` pairs on the device (RoCo's framework, arXiv 2402.06262).

A policy selects the pairs to evict. The ops are plain PyTorch for every device: the methods are compared by the kept
pairs, not by speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from specache_compile.kernels.attention.attention_ops import weighted, weights_of
from specache_compile.kernels.attention.query import SEEN, grouped_bias, product
from specache_compile.kernels.op import Op, fake_of_query
from specache_compile.kernels.state.cursor import length_of
from specache_compile.kernels.state.layout import EMPTY
from specache_compile.kernels.state.operands import AttentionInputs, takes
from specache_compile.methods.field import Cropped, Field, LayerShape, LayerState, always
from specache_compile.methods.low_bit import number
from specache_compile.methods.method import Method
from specache_compile.options import MethodOptions, option, whole
from specache_compile.passes.recipe import OpCall, Recipe, named

from .policies import POLICIES, History

# What `history` holds of a pair: the last four figures of `History`, in their order.
HISTORY_SIZE = 4
# A block of all tokens.
WHOLE = 0
# Queries whose attention is held at once: on a CPU it then stays in the caches.
ROWS = 256


class Kept(NamedTuple):
    """The kept pairs [B, H, N, 2, d] and their tokens int32 [B, H, N] (-1: empty)."""

    kept: Tensor
    kept_token: Tensor


@takes(new=AttentionInputs, state=Kept)
def budget_attention(
    new: AttentionInputs, state: Kept, history: Tensor, policy: str, block: int, seed: int, scale: float,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """Attention of T new tokens over the kept pairs and each other. The new pairs join the kept ones; pairs beyond b
    go.

    Mutates the state of b pairs, and float32 history [B, H, b, 4]. Returns [B, Hq, T, d] in q's dtype.

    Nothing goes while there is room. Then `block` tokens are encoded before as many pairs go (RoCo section 5.3,
    block-wise eviction); a decode step encodes one. Block 0 encodes all given tokens, with exact attention over the
    pairs kept before, and evicts once.
    """
    (kept, kept_token), queries = state, queries_of(new, scale, softcap)
    tokens, budget = new.k.shape[2], kept.shape[2]
    filled = min(queries.length, budget)
    pairs, token, past = kept[:, :, :filled], kept_token[:, :, :filled], history[:, :, :filled]
    added, numbers = queries.added(new)
    outputs, start = [], 0
    while start < tokens:
        stop = min(tokens, start + (budget - pairs.shape[2] or block or tokens))
        pairs = torch.cat([pairs, added[:, :, start:stop]], 2)
        token = torch.cat([token, numbers[:, :, start:stop]], 2)
        past = torch.cat([past, past.new_zeros(*past.shape[:2], stop - start, HISTORY_SIZE)], 2)
        for first in range(start, stop, ROWS):
            rows = slice(first, min(stop, first + ROWS))
            known = pairs.shape[2] - (stop - rows.stop)  # pairs are in the order of tokens: no row sees later ones
            attention, seen = queries.attention(rows, pairs[:, :, :known, 0], token[:, :, :known])
            outputs.append(weighted(attention, pairs[:, :, :known, 1]))
            mean = attention.mean(2)  # over the query group (RoCo section 5.3)
            past[:, :, :known] += received(mean, seen)
        if pairs.shape[2] > budget:
            random = torch.Generator().manual_seed(hash((seed, queries.length + stop)) % 2**63)
            stays = survivors(policy, token, past, mean[:, :, -1], seen[:, :, -1], budget, random)
            pairs = pairs.take_along_dim(stays[..., None, None], 2)
            token, past = token.gather(2, stays), past.take_along_dim(stays[..., None], 2)
        start = stop
    count = pairs.shape[2]
    kept[:, :, :count], kept_token[:, :, :count], history[:, :, :count] = pairs, token, past
    return torch.cat(outputs, 3).flatten(1, 2).to(new.q.dtype).contiguous()


@dataclass(frozen=True)
class NewQueries:
    """T new tokens that attend over the pairs kept before and each other.

    query: [B, H, G, T, d], scaled.
    bias: the additive mask [B|1, H|1, G|1, T|1, n + T], or None.
    sink: [H, G, 1, 1], or None.
    length: n, the number of earlier tokens, which are kept or not.
    """

    query: Tensor
    bias: Tensor | None
    sink: Tensor | None
    softcap: float | None
    length: int

    def attention(self, rows: slice, keys: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """The attention [B, H, G, t, N] of some new tokens, and which of them sees a pair of a KV head, [B, H, t, N].

        keys, token: [B, H, N, d] and their tokens' numbers [B, H, N].
        """
        logits = product(self.query[:, :, :, rows], keys, self.softcap)
        number = torch.arange(self.length + rows.start, self.length + rows.stop, device=token.device)
        seen = (token[:, :, None] <= number[:, None]) & (token[:, :, None] >= 0)
        if self.bias is not None:
            bias = self.bias if self.bias.shape[3] == 1 else self.bias[:, :, :, rows]
            shown = bias.take_along_dim(token.long().clamp(0)[:, :, None, None], -1)
            logits += shown
            seen = seen & (shown > SEEN).any(2)
        (weights,) = weights_of([logits.masked_fill_(~seen[:, :, None], -math.inf)], self.sink)
        return weights, seen

    def added(self, new: AttentionInputs) -> tuple[Tensor, Tensor]:
        """The new pairs [B, H, T, 2, d] and their tokens' numbers [B, H, T]."""
        numbers = torch.arange(self.length, self.length + new.k.shape[2], dtype=torch.int32, device=new.k.device)
        return torch.stack([new.k, new.v], dim=3), numbers.expand(*new.k.shape[:3])


def queries_of(new: AttentionInputs, scale: float, softcap: float | None) -> NewQueries:
    length, heads = length_of(new.cursor), new.k.shape[1]
    return NewQueries(
        new.q.float().unflatten(1, (heads, -1)) * scale,
        None if new.mask is None else grouped_bias(new.mask, heads, length + new.k.shape[2]),
        None if new.sinks is None else new.sinks.float().view(heads, -1, 1, 1),
        softcap, length,
    )  # fmt: skip


def received(attention: Tensor, seen: Tensor) -> Tensor:
    """The pairs' `history` [B, H, n, 4] from new queries; attention and seen [B, H, t, n]."""
    average = attention.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)
    parts = (attention, attention.square(), (attention > average) & seen, seen)
    return torch.stack([part.float().sum(2) for part in parts], -1)


def survivors(
    policy: str, token: Tensor, past: Tensor, last: Tensor, seen: Tensor, budget: int, random: torch.Generator
) -> Tensor:
    """The places [B, H, b] of the pairs that stay, in the order of their tokens. Pairs that no query sees go first."""
    history = History(token, last, *past.unbind(-1))
    importance = POLICIES[policy](history, budget, random).masked_fill(~seen, -math.inf)
    order = importance.argsort(dim=-1, stable=True)
    return order[..., token.shape[-1] - budget :].sort(dim=-1).values


def drop_from(kept_token: Tensor, length: int, *along: Tensor) -> None:
    """Drop the tokens from `length` on from kept_token [B, H, n] and from the tensors along it, [B, H, n, ...]. Evicted
    pairs do not come back."""
    gone = kept_token >= length
    order = (gone | (kept_token < 0)).to(torch.int8).argsort(dim=-1, stable=True)
    kept_token.masked_fill_(gone, EMPTY)
    for tensor in (kept_token, *along):
        tensor.copy_(tensor.take_along_dim(order.reshape(*order.shape, *(1,) * (tensor.dim() - 3)), 2))


ATTENTION = Op(
    "budget_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor cursor, Tensor(a!) kept, "
    "Tensor(b!) kept_token, Tensor(c!) history, str policy, int block, int seed, float scale, float? softcap) "
    "-> Tensor",
    budget_attention, fake_of_query, f"{__name__}:budget_attention",
    is_work=True, capturable=False,
)  # fmt: skip

# Between the random seeds of two sites; any large odd number will do.
SITE_STRIDE = 1_000_003
# An eviction block as long as the prompt.
PROMPT = "prompt"


@dataclass(frozen=True)
class BudgetOptions(MethodOptions):
    """The options of a method that keeps only some pairs."""

    budget: int | float = option(
        0.25, lambda budget: budget >= 1 if type(budget) is int else type(budget) is float and 0 < budget <= 1,
        "give a number of pairs, or a rate above 0.0, at most 1.0",
        "pairs that each KV head keeps, or a rate like 0.25 of the prompt's tokens",
        type=number, metavar="B",
    )  # fmt: skip

    @property
    def capacity_is_free(self) -> bool:
        """Shapes are cut to the budget."""
        return False

    def budget_in_tokens(self, tokens: int) -> int:
        """Pairs that each KV head keeps of a prompt of `tokens`; a rate rounds up."""
        if isinstance(self.budget, int):
            return self.budget
        return max(1, math.ceil(round(self.budget * tokens, 6)))  # 0.07 of 100 is 7.000000000000001 in floats

    def room(self, capacity: int) -> int:
        """Pairs that each KV head has room for, in a cache of `capacity` tokens."""
        return min(self.budget_in_tokens(capacity), capacity)

    def for_prompt(self, tokens: int) -> BudgetOptions:
        """A rate fixed to pairs: a cache keeps the budget that it started with."""
        return replace(self, budget=self.budget_in_tokens(tokens))


@dataclass(frozen=True)
class EvictionOptions(BudgetOptions):
    """The options of every policy."""

    eviction_block: int | str = whole(
        1, 1,
        "tokens encoded before as many pairs go, where a prompt is past the budget; prompt: all of it is read exactly, "
        "and evicted from once", words=(PROMPT,), metavar="TOKENS",
    )  # fmt: skip
    seed = 0


@dataclass(frozen=True)
class RandomOptions(EvictionOptions):
    """`random` also needs a seed."""

    seed: int = whole(0, 0, "of the policy's random numbers", metavar="SEED")


def rows(options: BudgetOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    return (batch, layer.heads, options.room(capacity))


def kept_shape(options: BudgetOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    return (*rows(options, layer, batch, capacity), 2, layer.head_dim)


def history_shape(options: BudgetOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    return (*rows(options, layer, batch, capacity), HISTORY_SIZE)


def forget(state: LayerState, cropped: Cropped) -> None:
    """Crop; the pairs that have been evicted before do not come back."""
    drop_from(state["kept_token"], cropped.length, *(state[name] for name in ("kept", "history") if name in state))


# The kept pairs, their tokens and their history; nothing is on the host.
KEPT = Field("kept", "kept", kept_shape, on_crop=forget)
KEPT_TOKEN = Field("kept_token", "kept", rows, always(torch.int32), empty=EMPTY)
HISTORY = Field("history", "kept", history_shape, always(torch.float32))
FIELDS = (KEPT, KEPT_TOKEN, HISTORY)


def eviction(policy: str) -> Method:
    """The method that evicts by one of POLICIES."""

    def recipe(options: EvictionOptions, site: int) -> Recipe:
        block = WHOLE if options.eviction_block == PROMPT else options.eviction_block
        # Where nothing is drawn all layers get the same seed, so that they are alike and one is compiled for all.
        seed = options.seed + SITE_STRIDE * site if policy == "random" else 0
        settings = {"policy": policy, "block": block, "seed": seed}
        attend = OpCall("budget_attention", named(*(field.name for field in FIELDS)), settings)
        return Recipe(dict.fromkeys(("prefill", "extend", "decode"), attend), ())

    options = RandomOptions if policy == "random" else EvictionOptions
    return Method(policy, options, FIELDS, recipe)


METHODS = tuple(eviction(policy) for policy in POLICIES)
