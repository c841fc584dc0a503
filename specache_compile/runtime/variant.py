"""The variants in which a captured graph is rewritten."""

from __future__ import annotations

from dataclasses import dataclass

from specache_compile.options import MethodOptions
from specache_compile.passes.phase import Phase


@dataclass(frozen=True)
class Variant:
    """A phase with a session's options.

    unpadded: of a graph with a padding mask, the variant for a mask that equals the rows' lengths.
    ragged: of a prefill, the variant for padding in front of rows, which is not stored.
    capacity: tokens of the state, if a graph serves one capacity only; None: any.
    """

    phase: Phase
    options: MethodOptions
    unpadded: bool = False
    ragged: bool = False
    capacity: int | None = None


def variant_of(phase: Phase, options: MethodOptions, unpadded: bool, ragged: bool, capacity: int) -> Variant:
    """The variant for a state with room for `capacity` tokens."""
    return Variant(phase, options, unpadded, ragged, None if options.capacity_is_free else capacity)


def selects(options: MethodOptions) -> bool:
    """Whether a decode step selects pairs for the next step; not if each token selects its own and none is
    speculative."""
    return options.top_k > 0 and (options.two_lanes or not options.corrects)


def phases(phase: Phase, options: MethodOptions) -> tuple[Phase, ...]:
    """The phases that a graph captured in this phase is rewritten for."""
    return (phase.before, phase) if phase.before is not None and selects(options) else (phase,)
