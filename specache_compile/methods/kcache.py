"""KCache (004): keys on the device, values on the host; each query head fetches the N values that it weighs most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specache_compile.passes.recipe import Call, Recipe

from . import full
from .method import UNSELECTED, Method, Shapes

if TYPE_CHECKING:
    from specache_compile.options import Options
    from specache_compile.tiers import LayerShape


def shapes(options: Options, layer: LayerShape, batch: int, capacity: int) -> Shapes:
    """Keys on the device and whole pairs on the host, where extends read them; a kept layer has its full cache."""
    if layer.number < options.kept_layers:
        return full.shapes(options, layer, batch, capacity)
    rows = (batch, layer.heads, capacity)
    return {
        "host": ((*rows, 2, layer.head_dim), layer.dtype),
        "device_keys": ((*rows, layer.head_dim), layer.dtype),
    }


def recipe(options: Options, site: int) -> Recipe:
    if site < options.kept_layers:
        return full.recipe(options, site)
    return Recipe(
        {
            "extend": Call("extend_attention", ("host",)),
            "decode": Call("kcache_attention", ("device_keys", "host"), (options.top_n,)),
        },
        (Call("keep_keys", ("device_keys",)), Call("offload", ("host",))),
    )


METHOD = Method(
    "kcache",
    ("top_n", "kept_layers", "host_memory"),
    shapes,
    recipe,
    UNSELECTED,
)
