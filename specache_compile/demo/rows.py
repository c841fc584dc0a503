"""The methods that the demo shows, and its results for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specache_compile.bench.ways import COMPILED
from specache_compile.evaluation.settings import UNCOMPILED

FULL, DEFAULT = "full cache", "specache, 1.5 bits (the default)"
# The full cache's one tier.
DENSE = "16-bit pairs"
# Settings as `specache eval` spells them.
METHODS = {
    FULL: UNCOMPILED,
    "KIVI, 1 bit": "kivi:bits=1",
    "SpeCache as in its paper, 1 bit": "specache:setting=paper,bits=1",
    "specache, 1 bit": "specache:bits=1",
    DEFAULT: "specache",
}
# As in `specache bench`, the full cache's step is torch.compile's.
TIMED = {**METHODS, FULL: COMPILED}


@dataclass
class Row:
    """One method.

    answer: to the one question.
    keys: whether each key was found, 0 or 1, by depth.
    tiers: bytes of one sequence, by tier.
    kv_ratio: the device's bytes over the full cache's.
    step_ms, step_ms_half: the median of the compiled decode steps, and the ends of their middle half, by context in
    tokens; empty where none was timed.
    """

    method: str
    answer: str
    keys: dict[float, float]
    tiers: Mapping[str, int]
    kv_ratio: float
    step_ms: dict[int, float] = field(default_factory=dict)
    step_ms_half: dict[int, list[float]] = field(default_factory=dict)
