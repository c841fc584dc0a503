"""One point of a diagnostic's picture."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """curve: the name of its curve.
    count: how many measurements y is the mean of.
    """

    curve: str
    x: float
    y: float
    count: int
