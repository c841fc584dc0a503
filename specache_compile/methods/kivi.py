"""KIVI (Liu et al. 2024): the low-bit copy and the recent window alone; no pair is fetched. The host tier is kept for
extends and crops, which stay exact."""

from __future__ import annotations

from . import specache
from .method import Method

# The window that SpeCache's paper gives its baseline: as many pairs in 16 bits as R and k are together there.
RESIDUAL_LENGTH = 128

METHOD = Method(
    "kivi",
    specache.TIERS,
    specache.shapes,
    specache.recipe,
    {"top_k": 0, "speculate": False, "residual_length": RESIDUAL_LENGTH},
)
