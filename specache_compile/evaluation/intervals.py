"""95 % intervals of means and shares."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# The 97.5 % point of the normal distribution, and of Student's t with 1 to 3 degrees of freedom.
NORMAL, FEW = 1.959964, (12.706, 4.303, 3.182)


def interval(values: Sequence[float]) -> float:
    """Half the width of the mean's 95 % interval, by Student's t; NaN for a single value or one that is NaN."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def wilson(found: int, count: int) -> tuple[float, float]:
    """The ends of the 95 % interval of a share, `found` of `count`, by Wilson's score."""
    spread = NORMAL**2 / count
    middle = (found / count + spread / 2) / (1 + spread)
    half = math.sqrt(found * (count - found) / count + NORMAL**2 / 4) * NORMAL / count / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def student(degrees: int) -> float:
    """The 97.5 % point of Student's t: beyond three degrees by four terms of its expansion in them (Abramowitz and
    Stegun, 26.7.5), to two digits behind the point."""
    if degrees <= len(FEW):
        return FEW[degrees - 1]
    z = NORMAL
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))
