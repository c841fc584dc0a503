"""What a captured graph is rewritten for."""

from __future__ import annotations

from dataclasses import dataclass

from specache_compile.options import MethodOptions
from specache_compile.passes.phase import WIDENED, Phase


@dataclass(frozen=True)
class Variant:
    """A phase and a session's options.

    unpadded: of a graph that takes a padding mask, the form for one that says nothing that the rows' lengths do not.
    ragged: of a prefill, the form for padding in front of rows, which is not stored.
    capacity: tokens that the state has room for, where a graph serves one number of them; None: any.
    paged: the state's tokens are in pages.
    """

    phase: Phase
    options: MethodOptions
    unpadded: bool = False
    ragged: bool = False
    capacity: int | None = None
    paged: bool = False


def variant_of(
    phase: Phase, options: MethodOptions, unpadded: bool, ragged: bool, capacity: int, paged: bool = False
) -> Variant:
    """What serves a state with room for `capacity` tokens."""
    free = options.capacity_is_free and phase is not WIDENED  # whose choices Inductor sums, in 32 bits if they fit
    return Variant(phase, options, unpadded, ragged, None if free else capacity, paged)


def selects(options: MethodOptions) -> bool:
    """Whether a decode step selects pairs for the next one: not where each token chooses its own, and guesses none."""
    chooses_itself = options.correct == "always" and "correct" not in options.disable_passes
    ahead = options.two_lanes or not chooses_itself
    return bool(options.top_k) and ahead and "prefetch" not in options.disable_passes


def phases(phase: Phase, options: MethodOptions) -> tuple[Phase, ...]:
    """The phases that a captured graph of this one is rewritten for."""
    return (phase.before, phase) if phase.before is not None and selects(options) else (phase,)
