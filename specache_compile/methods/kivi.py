"""KIVI (arXiv 2402.02750): the low-bit copy and the recent window alone; no pair is fetched. The host tier is kept for
extends and crops, which stay exact; with `host_tier=False` there is none, as in KIVI itself."""

from __future__ import annotations

from dataclasses import dataclass

from specache_compile.options import inherited

from . import specache
from .low_bit import LowBitOptions, bits_or_memory
from .method import Method


@dataclass(frozen=True)
class KiviOptions(LowBitOptions):
    """The window is the one that SpeCache's paper gives its baseline: as many pairs in 16 bits as R and k together."""

    method: str = "kivi"
    residual_length: int = inherited(LowBitOptions, "residual_length", default=128)


METHOD = Method(
    "kivi", KiviOptions, specache.FIELDS, specache.recipe, specache.fields_at, bits_or_memory, rows_differ=True
)
