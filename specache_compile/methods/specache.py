"""SpeCache (001): a low-bit copy on the device, and the k pairs that the next step wants fetched one step ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specache_compile.kernels.quantize import packed_width, value_group
from specache_compile.passes.recipe import Call, Recipe

from .method import Method, Shapes

if TYPE_CHECKING:
    from specache_compile.options import Options
    from specache_compile.tiers import LayerShape

TIERS = ("bits", "group_size", "residual_length", "zero_point", "host_memory", "min_context")
LOW_BIT = ("codes", "key_params", "value_params")


def shapes(options: Options, layer: LayerShape, batch: int, capacity: int) -> Shapes:
    """Host, low-bit, recent and slots; scales are in the model's dtype."""
    rows = (batch, layer.heads)
    d, dtype = layer.head_dim, layer.dtype
    quantized = options.bits < 16
    width = packed_width(d, options.bits) if quantized else d
    groups = capacity // options.group_size if quantized else 0
    tokens = capacity if quantized else 0
    return {
        "host": ((*rows, capacity, 2, d), dtype),
        "codes": ((*rows, capacity, 2, width), torch.uint8 if quantized else dtype),
        "key_params": ((*rows, groups, 2, d), dtype),
        "value_params": ((*rows, tokens, 2, d // value_group(d, options.group_size)), dtype),
        "recent": ((*rows, options.window, 2, d), dtype),
        "slots": ((*rows, options.top_k, 2, d), dtype),
        "slot_index": ((*rows, options.top_k), torch.int32),
        "wanted": ((*rows, options.top_k), torch.int32),
        "fetched": ((1,), torch.int64),
        "tally": ((3,), torch.float64),
    }


def recipe(options: Options, site: int) -> Recipe:
    """Decode attends over the tiers, an extend over the host's; the `prefetch` and `speculate` passes do the rest."""
    over_tiers = Call("decode_attention", (*LOW_BIT, "recent", "slots", "slot_index"), scores=True)
    return Recipe(
        {"pre-decode": over_tiers, "decode": over_tiers, "extend": Call("extend_attention", ("host",))},
        (Call("append", ("recent", *LOW_BIT), (options.zero_point,)), Call("offload", ("host",))),
    )


METHOD = Method(
    "specache",
    (*TIERS, "top_k", "speculate", "hit_rate"),
    shapes,
    recipe,
)
