"""Eviction once, behind an exact prefill: each KV head keeps a budget of a prompt's pairs, and all later pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specache_compile.caches.holding import taken_over
from specache_compile.kernels.attention.attention_ops import BLOCK, weighted
from specache_compile.kernels.op import Op, fake_of_query
from specache_compile.kernels.state.layout import EMPTY
from specache_compile.kernels.state.operands import AttentionInputs, takes
from specache_compile.methods.method import Method
from specache_compile.passes.recipe import OpCall, Recipe, named
from specache_compile.runtime.step import Step

from .eviction import KEPT, KEPT_TOKEN, BudgetOptions, Kept, queries_of


@dataclass(frozen=True)
class Prompt:
    """A prompt of n tokens to choose from.

    query: scaled, [B, H, G, n, d].
    pairs: [B, H, n, 2, d].
    attention_of: gives for the queries `first` to `stop` their attention [B, H, G, t, stop] and the pairs that each
    sees, bool [B, H, t, stop].
    frequencies: RoPE's, [h]; None where the graph turns no channels by them.
    """

    query: Tensor
    pairs: Tensor
    attention_of: Callable[[int, int], tuple[Tensor, Tensor]]
    frequencies: Tensor | None


# (prompt, budget b, the method's settings) → the places [B, H, b] of the pairs that stay, in their order.
Choose = Callable[..., Tensor]
CHOICES: dict[str, Choose] = {}


@takes(new=AttentionInputs, state=Kept)
def prompt_attention(
    new: AttentionInputs, state: Kept, method: str, budget: int, settings: Sequence[int], scale: float,
    softcap: float | None, frequencies: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Exact attention of T new tokens over the kept pairs and each other; the new pairs then join the kept ones. Of a
    prompt (nothing is cached before it) longer than the budget b only the b pairs stay that CHOICES[method] names.

    Mutates the state, with room for b pairs and the tokens behind the prompt. A step that failed half way may be taken
    again. Returns [B, Hq, T, d] in q's dtype.
    """
    (kept, kept_token), queries = state, queries_of(new, scale, softcap)
    length, tokens = queries.length, new.k.shape[2]
    held = ((kept_token >= 0) & (kept_token < length)).sum(-1)  # [B, H]
    before = int(held.max())
    there = torch.arange(before, device=held.device) < held.unsqueeze(-1)
    pairs = kept[:, :, :before].masked_fill(~there[..., None, None], 0.0)
    added, number = queries.added(new)
    every = torch.cat([pairs, added], 2)
    token = torch.cat([kept_token[:, :, :before].masked_fill(~there, EMPTY), number], 2)

    def attention_of(first: int, stop: int) -> tuple[Tensor, Tensor]:
        """The attention of the new queries first..stop over all pairs before `stop`."""
        keys = slice(before + stop)
        return queries.attention(slice(first, stop), every[:, :, keys, 0], token[:, :, keys])

    outputs = []
    for first in range(0, tokens, BLOCK):
        stop = min(tokens, first + BLOCK)
        attention, _ = attention_of(first, stop)
        outputs.append(weighted(attention, every[:, :, : before + stop, 1]))
    if length == 0 and tokens > budget:
        stays = CHOICES[method](Prompt(queries.query, every, attention_of, frequencies), budget, *settings)
        kept_token.fill_(EMPTY)
        kept[:, :, :budget] = every.take_along_dim(stays[..., None, None], 2)
        kept_token[:, :, :budget] = token.gather(2, stays)
    else:
        behind = held.unsqueeze(-1) + torch.arange(tokens, device=held.device)
        kept.scatter_(2, behind[..., None, None].expand(added.shape), added)
        kept_token.scatter_(2, behind, number)
    return torch.cat(outputs, 3).flatten(1, 2).to(new.q.dtype).contiguous()


ATTENTION = Op(
    "prompt_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor cursor, "
    "Tensor(a!) kept, Tensor(b!) kept_token, str method, int budget, int[] settings, float scale, "
    "float? softcap, Tensor? frequencies=None) -> Tensor",
    prompt_attention, fake_of_query, f"{__name__}:prompt_attention",
    is_work=True, capturable=False,
)  # fmt: skip

# Prompts whose lengths lie in one step share graphs, at the price of at most so many pairs of spare room.
STEP = 32


@dataclass(frozen=True)
class PromptOptions(BudgetOptions):
    """Only a session sets these.

    prompt: the largest multiple of STEP up to the prompt's tokens; it gives the room for later pairs.
    most: room for the pairs of the KV head that keeps most, where some keep more than the budget; 0: the budget.
    """

    prompt: int = 0
    most: int = 0

    def for_prompt(self, tokens: int) -> PromptOptions:
        return replace(self, budget=self.budget_in_tokens(tokens), prompt=tokens - tokens % STEP)

    def room(self, capacity: int) -> int:
        """The budget, or the most of a head, and room for all tokens behind the prompt."""
        return min(capacity, (self.most or self.budget_in_tokens(capacity)) + capacity - self.prompt)


def hold_chosen(cache: Any, model: torch.nn.Module, options: PromptOptions, chosen: Tensor) -> DynamicCache:
    """A cache that the model continues, which is compiled with `options`: those pairs of a plain cache that `chosen`
    [sites, B, H, m] names. `cache` is unchanged."""

    def fill(step: Step, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        with step.filling() as state:
            for (keys, values), here, token in zip(pairs, state, chosen, strict=True):
                every = torch.stack([keys, values], 3)
                place = token.long().clamp(0)[..., None, None]
                here["kept"][:, :, : token.shape[2]] = every.take_along_dim(place, 2)
                here["kept_token"][:, :, : token.shape[2]] = token

    return taken_over(cache, model, options, None, fill)


def method_of(
    name: str, options: type[PromptOptions], choose: Choose, settings: tuple[str, ...] = (), turned: bool = False
) -> Method:
    """The method that keeps what `choose` selects. settings: the options that it gets, integers; turned: whether it
    reads RoPE's frequencies."""
    CHOICES[name] = choose

    def recipe(options: PromptOptions, site: int) -> Recipe:
        own = [getattr(options, each) for each in settings]
        given = {"method": name, "budget": options.budget_in_tokens(options.prompt), "settings": own}
        attend = OpCall("prompt_attention", named(*Kept._fields), given, turned=KEPT.name if turned else "")
        return Recipe(dict.fromkeys(("prefill", "extend", "decode"), attend), ())

    return Method(name, options, (KEPT, KEPT_TOKEN), recipe)
