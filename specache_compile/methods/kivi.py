"""KIVI (arXiv 2402.02750): only the low-bit copy and the recent window; no pair is fetched.

A host tier keeps extends and crops exact; with `host_tier=False` there is none, as in KIVI itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from specache_compile.options import inherited
from specache_compile.passes.recipe import OpCall, Recipe

from .field import Field, LayerShape
from .host_tier import HOST
from .low_bit import APPENDED, LOW_BIT, RECENT, LowBitOptions, bits_or_memory
from .method import Method
from .slots import SLOT_INDEX, SLOTS


@dataclass(frozen=True)
class KiviOptions(LowBitOptions):
    """The default window is that of the SpeCache paper's baseline: as many 16-bit pairs as R and k together."""

    method: str = "kivi"
    residual_length: int = inherited(LowBitOptions, "residual_length", default=128)


def recipe(options: LowBitOptions, site: int) -> Recipe:
    """A decode attends over the tiers, an extend over the host tier."""
    over_tiers = OpCall(
        "decode_attention",
        (*(field.name for field in LOW_BIT), "recent", "slots", "slot_index"),
        (*options.layout, options.skip_below),
        scores=True,
    )
    attend = dict.fromkeys(("pre-decode", "decode", "widened"), over_tiers)
    stores: tuple[OpCall, ...] = (OpCall("append", APPENDED, (*options.layout, options.zero_point), turned="center"),)
    if options.host_tier:
        attend |= {"extend": OpCall("extend_attention", ("host",))}
        stores += (OpCall("offload", ("host",)),)
    return Recipe(attend, stores)


# The attention's slots have no place here (top_k 0).
FIELDS = (HOST, *LOW_BIT, RECENT, SLOTS, SLOT_INDEX)


def fields_at(options: LowBitOptions, layer: LayerShape) -> tuple[Field, ...]:
    return FIELDS if options.host_tier else tuple(field for field in FIELDS if field is not HOST)


METHOD = Method("kivi", KiviOptions, FIELDS, recipe, fields_at, bits_or_memory, rows_differ=True)
