"""Select cases of a grid that cover every pair of values; `make test-all` runs the whole grid.

Pairs that no case has need no coverage. A parameter that is a dataclass counts by its fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from heapq import heapify, heappop, heappush
from itertools import combinations
from typing import Any


def values(parameters: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return name and value of each parameter, and of each field of a dataclass parameter."""
    for name, value in parameters.items():
        if is_dataclass(value):
            yield from ((f"{name}.{field.name}", repr(getattr(value, field.name))) for field in fields(value))
        else:
            yield name, repr(value)


def chosen(cases: Sequence[Mapping[str, Any]], together: int = 2) -> list[int]:
    """Return indices of few cases, found greedily, that cover all combinations of this many values in any case."""
    shown = [set(combinations(found, min(together, len(found)))) for found in map(sorted, map(values, cases))]
    left, places = set().union(*shown), []
    gains = [(-len(pairs), place) for place, pairs in enumerate(shown)]
    heapify(gains)
    while left:
        _, place = heappop(gains)
        gain = -len(shown[place] & left)  # a gain only shrinks, so the case with the largest one may be chosen
        if gains and (gain, place) > gains[0]:
            heappush(gains, (gain, place))
            continue
        places.append(place)
        left -= shown[place]
    return sorted(places)
