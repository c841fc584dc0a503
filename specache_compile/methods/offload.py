"""Offloading: every pair on the host, brought to the device layer by layer for every step; exact, and bound by PCIe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specache_compile.passes.recipe import Call, Recipe

from .method import UNSELECTED, Method, Shapes

if TYPE_CHECKING:
    from specache_compile.options import Options
    from specache_compile.tiers import LayerShape


def shapes(options: Options, layer: LayerShape, batch: int, capacity: int) -> Shapes:
    return {"host": ((batch, layer.heads, capacity, 2, layer.head_dim), layer.dtype)}


def recipe(options: Options, site: int) -> Recipe:
    """A decode step is an extend by one token: the host tier streams through in blocks."""
    exact = Call("extend_attention", ("host",))
    return Recipe({"extend": exact, "decode": exact}, (Call("offload", ("host",)),))


METHOD = Method("offload", ("host_memory",), shapes, recipe, UNSELECTED)
