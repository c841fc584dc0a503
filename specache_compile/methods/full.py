"""The full cache: every pair on the device in the model's dtype, every attention exact."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specache_compile.passes.recipe import Call, Recipe

from .method import UNSELECTED, Method, Shapes

if TYPE_CHECKING:
    from specache_compile.options import Options
    from specache_compile.tiers import LayerShape


def shapes(options: Options, layer: LayerShape, batch: int, capacity: int) -> Shapes:
    return {"full_cache": ((batch, layer.heads, capacity, 2, layer.head_dim), layer.dtype)}


def recipe(options: Options, site: int) -> Recipe:
    """The op that an extend uses over the host tier, over the cache; its new pairs go there."""
    exact = Call("extend_attention", ("full_cache",))
    return Recipe({"extend": exact, "decode": exact}, (Call("offload", ("full_cache",)),))


METHOD = Method("full", (), shapes, recipe, UNSELECTED)
