"""Eviction: each KV head keeps at most `budget` pairs on the device and forgets the rest (RoCo's framework,
arXiv 2402.06262)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from specache_compile.errors import OptionError
from specache_compile.kernels import evict
from specache_compile.kernels.evict import WHOLE
from specache_compile.kernels.tiers import EMPTY
from specache_compile.options import MethodOptions, option, whole
from specache_compile.passes.recipe import Call, Recipe

from .field import Cropped, Field, LayerShape, LayerState, always
from .method import Method

# Between the random numbers of two sites' heads; any large odd number does.
SITE_STRIDE = 1_000_003
# An eviction block as long as what is read.
PROMPT = "prompt"


def check_budget(name: str, value: Any) -> None:
    pairs, rate = type(value) is int and value >= 1, type(value) is float and 0 < value <= 1
    if not (pairs or rate):
        raise OptionError(f"option {name}={value!r}: give a number of pairs, or a rate above 0.0, at most 1.0")


def check_block(name: str, value: Any) -> None:
    if value != PROMPT and (type(value) is not int or value < 1):
        raise OptionError(f"option {name}={value!r}: give a number of tokens, 1 or more, or {PROMPT!r}")


def pairs_or_rate(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def tokens_or_prompt(text: str) -> int | str:
    return int(text) if text.isdigit() else text


@dataclass(frozen=True)
class BudgetOptions(MethodOptions):
    """Those of a method that keeps some pairs alone."""

    budget: int | float = option(
        0.25, check_budget, "pairs that each KV head keeps, or a rate like 0.25 of the prompt's tokens",
        type=pairs_or_rate, metavar="B",
    )  # fmt: skip

    def budget_in_tokens(self, tokens: int) -> int:
        """Pairs that each KV head keeps of a prompt of `tokens`; a rate rounds up."""
        if isinstance(self.budget, int):
            return self.budget
        return max(1, math.ceil(round(self.budget * tokens, 6)))  # 0.07 of 100 is 7.000000000000001 by itself

    def for_prompt(self, tokens: int) -> BudgetOptions:
        """A rate fixed to pairs: a cache keeps the budget that it started with."""
        return replace(self, budget=self.budget_in_tokens(tokens))


@dataclass(frozen=True)
class EvictionOptions(BudgetOptions):
    """Those of every policy."""

    eviction_block: int | str = option(
        1, check_block,
        "tokens encoded before as many pairs go, where a prompt is past the budget; prompt: all of it is read exactly, "
        "and evicted from once", type=tokens_or_prompt, metavar="TOKENS",
    )  # fmt: skip
    seed = 0


@dataclass(frozen=True)
class RandomOptions(EvictionOptions):
    """`random` needs a seed besides."""

    seed: int = whole(0, 0, "of the policy's random numbers", metavar="SEED")


def rows(options: EvictionOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    return (batch, layer.heads, min(options.budget_in_tokens(capacity), capacity))


def kept_shape(options: EvictionOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    return (*rows(options, layer, batch, capacity), 2, layer.head_dim)


def history_shape(options: EvictionOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    return (*rows(options, layer, batch, capacity), evict.HISTORY_SIZE)


def forget(state: LayerState, cropped: Cropped) -> None:
    """What a policy has evicted of the tokens that stay does not come back."""
    evict.forget(state["kept_token"], cropped.length, state["kept"], state["history"])


# The kept pairs, their tokens, and what the policy has counted of them; nothing on the host.
KEPT = Field("kept", "kept", kept_shape, on_crop=forget)
KEPT_TOKEN = Field("kept_token", "kept", rows, always(torch.int32), empty=EMPTY)
HISTORY = Field("history", "kept", history_shape, always(torch.float32))
FIELDS = (KEPT, KEPT_TOKEN, HISTORY)


def eviction(policy: str) -> Method:
    """The method that evicts by a policy of `kernels.policies`."""

    def recipe(options: EvictionOptions, site: int) -> Recipe:
        block = WHOLE if options.eviction_block == PROMPT else options.eviction_block
        # Layers that draw nothing are given the same, so that they are alike, and one is compiled for all.
        seed = options.seed + SITE_STRIDE * site if policy == "random" else 0
        attend = Call("budget_attention", tuple(field.name for field in FIELDS), (policy, block, seed))
        return Recipe(dict.fromkeys(("prefill", "extend", "decode"), attend), ())

    return Method(policy, RandomOptions if policy == "random" else EvictionOptions, FIELDS, recipe, has_budget=True)
