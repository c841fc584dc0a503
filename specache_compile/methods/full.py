"""The full cache: all pairs on the device in the model's dtype, all attention exact."""

from __future__ import annotations

from dataclasses import dataclass

from specache_compile.options import MethodOptions
from specache_compile.passes.recipe import OpCall, Recipe

from .field import Field
from .host_tier import whole_cache
from .method import Method


@dataclass(frozen=True)
class FullOptions(MethodOptions):
    method: str = "full"


def recipe(options: MethodOptions, site: int) -> Recipe:
    """An extend and a decode use the op that reads the host tier in other methods, over the cache, which stores new
    pairs."""
    exact = OpCall("extend_attention", {"host": "full_cache"})
    return Recipe({"extend": exact, "decode": exact}, (OpCall("offload", {"host": "full_cache"}),))


FULL_CACHE = Field("full_cache", "cache", whole_cache, by_page=True, has_all_pairs=True)
METHOD = Method("full", FullOptions, (FULL_CACHE,), recipe, rows_differ=True)
