"""The phases: kinds of captured graphs, and how each is rewritten."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """The kind of a graph.

    has_past: the graph continues a cache.
    one_token: each row has one new token, and attention reads the low-bit tier, the window and the slots.
    stores: the tiers store the new pairs.
    once: the graph runs once per generation, so it runs op by op: compiling it would take longer than it saves.
    before: the phase that fills the slots before this phase's first step, and makes the first speculative token.
    """

    name: str
    has_past: bool = True
    one_token: bool = False
    stores: bool = True
    once: bool = False
    before: Phase | None = None

    def __str__(self) -> str:
        return self.name


PREFILL = Phase("prefill", has_past=False)
EXTEND = Phase("extend")
# The extra pass that makes the first speculative token and the first selection of pairs (SpeCache, section 3.3).
PRE_DECODE = Phase("pre-decode", one_token=True, stores=False, once=True)
DECODE = Phase("decode", one_token=True, before=PRE_DECODE)
PHASES = (PREFILL, EXTEND, PRE_DECODE, DECODE)
