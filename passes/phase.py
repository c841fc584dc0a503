"""What a captured graph does, and what its rewritten form may do for it: each phase declared once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Phase:
    """What a graph does.

    has_past: the graph goes on from a cache.
    one_token: one new token a row, as in every step of a generation.
    over_tiers: attention is over the tiers, with what the slots hold.
    stores: the new pairs are kept.
    once: the graph runs once a generation, and so op by op: Inductor would take many times what its code saves.
    speculates: a guess of the next token runs beside the token, in a second lane.
    before: the phase that runs before the first step of this one, to fill the slots.
    """

    name: str
    has_past: bool = True
    one_token: bool = False
    over_tiers: bool = False
    stores: bool = True
    once: bool = False
    speculates: bool = False
    before: Phase | None = None

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> Any:
        """By its name: phases are compared by what they are, not by what they say."""
        return (phase_named, (self.name,)) if self in PHASES else super().__reduce__()


def phase_named(name: str) -> Phase:
    return next(phase for phase in PHASES if phase.name == name)


PREFILL = Phase("prefill", has_past=False)
EXTEND = Phase("extend")
# The extra pass that makes the first guess, and the first choice of pairs (SpeCache, section 3.3).
PRE_DECODE = Phase("pre-decode", one_token=True, over_tiers=True, stores=False, once=True)
DECODE = Phase("decode", one_token=True, over_tiers=True, speculates=True, before=PRE_DECODE)
# A decode of several tokens, each of them a lane: the last one said, and a draft that is looked up.
WIDENED = Phase("widened", over_tiers=True)
PHASES = (PREFILL, EXTEND, PRE_DECODE, DECODE, WIDENED)
