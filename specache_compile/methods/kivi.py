"""KIVI (arXiv 2402.02750): only the low-bit copy and the recent window; no pair is fetched.

A host tier keeps extends and crops exact; with `host_tier=False` there is none, as in KIVI itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from specache_compile.options import inherited

from . import specache
from .low_bit import LowBitOptions, bits_or_memory
from .method import Method


@dataclass(frozen=True)
class KiviOptions(LowBitOptions):
    """The default window is that of the SpeCache paper's baseline: as many 16-bit pairs as R and k together."""

    method: str = "kivi"
    residual_length: int = inherited(LowBitOptions, "residual_length", default=128)


METHOD = Method(
    "kivi", KiviOptions, specache.FIELDS, specache.recipe, specache.fields_at, bits_or_memory, rows_differ=True
)
