"""KCache (arXiv 2404.18057): keys on the device, values on the host; each query head fetches the N values that it
weighs most."""

from __future__ import annotations

from dataclasses import dataclass

from specache_compile.options import whole
from specache_compile.passes.recipe import Call, Recipe

from . import full
from .drafting import DraftOptions
from .field import Field, LayerShape
from .host_tier import HOST
from .method import Method


@dataclass(frozen=True)
class KCacheOptions(DraftOptions):
    method: str = "kcache"
    top_n: int = whole(128, 1, "N: values that each query head fetches in a step", metavar="N")
    kept_layers: int = whole(1, 0, "first layers whose values stay on the device", metavar="LAYERS")


def keys_shape(options: KCacheOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    return (batch, layer.heads, capacity, layer.head_dim)


DEVICE_KEYS = Field("device_keys", "keys", keys_shape)


def fields_at(options: KCacheOptions, layer: LayerShape) -> tuple[Field, ...]:
    """Keys on the device and whole pairs on the host, where extends read them; a kept layer has its full cache."""
    return (full.FULL_CACHE,) if layer.number < options.kept_layers else (HOST, DEVICE_KEYS)


def recipe(options: KCacheOptions, site: int) -> Recipe:
    if site < options.kept_layers:
        return full.recipe(options, site)
    return Recipe(
        {
            "extend": Call("extend_attention", ("host",)),
            "decode": Call("kcache_attention", ("device_keys", "host"), (options.top_n,)),
        },
        (Call("keep_keys", ("device_keys",)), Call("offload", ("host",))),
    )


METHOD = Method("kcache", KCacheOptions, (HOST, DEVICE_KEYS, full.FULL_CACHE), recipe, fields_at)
