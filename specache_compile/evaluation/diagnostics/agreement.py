"""How often the speculative token is right: the token that the model says one step later."""

from __future__ import annotations

from .inspected import Inspected
from .point import Point
from .speculation import BITS, COUNTS, continued


def points(run: Inspected) -> list[Point]:
    """A curve for each width of the low-bit tier, from the same greedy runs as `speculation`."""
    count = (run.steps - 2) * run.ids.shape[0]  # no step is fed the tokens of the last two guesses
    return [Point(f"{bits}-bit", k, continued(run, bits, k, True).agreement, count) for bits in BITS for k in COUNTS]
