"""SnapKV (arXiv 2404.14469): of a prompt each KV head keeps what its last queries attend to, chosen once after an exact
prefill; whatever comes later stays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from specache_compile.errors import OptionError
from specache_compile.kernels import evict
from specache_compile.kernels.snapkv import POOLINGS
from specache_compile.kernels.tiers import EMPTY
from specache_compile.options import choice, option, whole
from specache_compile.passes.recipe import Call, Recipe

from .eviction import BudgetOptions
from .field import Cropped, Field, LayerShape, LayerState, always
from .method import Method

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
    evict.forget(state["compressed_token"], cropped.length, state["compressed"])


COMPRESSED = Field("compressed", "kept", compressed_shape, on_crop=forget)
COMPRESSED_TOKEN = Field("compressed_token", "kept", rows, always(torch.int32), empty=EMPTY)
FIELDS = (COMPRESSED, COMPRESSED_TOKEN)


def recipe(options: SnapKVOptions, site: int) -> Recipe:
    settings = (options.budget_in_tokens(options.prompt), options.window, options.kernel, options.pooling)
    attend = Call("snapkv_attention", tuple(field.name for field in FIELDS), settings)
    return Recipe(dict.fromkeys(("prefill", "extend", "decode"), attend), ())


METHOD = Method("snapkv", SnapKVOptions, FIELDS, recipe, has_budget=True)
