"""Of a grid of cases those that show every two values together; the rest of the grid is for `make test-all`.

Values of two parameters that no case has together need no case. A parameter that is a dataclass counts by its fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import combinations
from typing import Any


def values(parameters: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The name and value of each parameter, and of each field of one that is a dataclass."""
    for name, value in parameters.items():
        if is_dataclass(value):
            yield from ((f"{name}.{field.name}", repr(getattr(value, field.name))) for field in fields(value))
        else:
            yield name, repr(value)


def chosen(cases: Sequence[Mapping[str, Any]], together: int = 2) -> list[int]:
    """Places of the cases that show all that any case does, of so many values together; greedily, few of them."""
    shown = [set(combinations(sorted(values(case)), together)) for case in cases]
    left, places = set().union(*shown), []
    while left:
        place = max(range(len(cases)), key=lambda i: len(shown[i] & left))
        places.append(place)
        left -= shown[place]
    return sorted(places)
