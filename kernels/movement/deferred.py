"""Deferred fetches: those that a replay of a recorded step leaves to whoever comes next.

    attend_0, ..., attend_n | join             gather_n beside attend_0, ...; wait_n, attend_n | join
    copies: gather_0, ..., gather_n            copies: gather_n, gather_0, ...

A recorded step must end with its copies joined, and its last layers' fetches would have no time to hide. So the next
replay makes them first, beside its early layers; or, where something else needs the slots before, that does. A fetch
can be made at any time, and again, since it takes only what `selected` names and the slots lack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# The arguments of a `prefetch`, and the state tensors among them.
Fetch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
FETCH_STATE = ("selected", "host", "slots", "slot_index", "fetched")

# While a step is recorded: the end of the fetches that it makes first, by the address of their slots.
_made_first: dict[int, Any] = {}


def deferrable(state: Sequence[Mapping[str, Tensor]], cursor: Tensor) -> list[Fetch]:
    """The fetches of the last quarter of layers, by their state tensors.

    A quarter: the fetch before them hides behind that much compute, and they behind three times as much.
    """
    fetching = [layer for layer in state if "selected" in layer and layer["selected"].numel()]
    return [fetch_arguments(layer, cursor) for layer in last_quarter(fetching)]


def last_quarter(fetching: Sequence[T]) -> Sequence[T]:
    """Of what the layers fetch, in their order, what is deferred; of one alone, nothing."""
    late = max(1, len(fetching) // 4) if len(fetching) > 1 else 0
    return fetching[len(fetching) - late :]


def fetch_arguments(state: Mapping[str, Any], cursor: Any) -> Any:
    """The arguments of a layer's `prefetch`, tensors or the nodes that stand for them."""
    selected, *rest = (state[field] for field in FETCH_STATE)
    return (selected, cursor, *rest)


@contextmanager
def made_first(fetches: Sequence[Fetch], ended: Callable[[], Any]) -> Iterator[None]:
    """Within it, while a step is recorded: these fetches come first, and are left out where the step would make them.
    ended(): an event behind the newest of them."""
    try:
        for fetch in fetches:
            torch.ops.specache.prefetch(*fetch)
            _made_first[fetch[3].data_ptr()] = ended()
        yield
    finally:
        _made_first.clear()


def is_made_first(slots: Tensor) -> bool:
    """Whether the step that is being recorded has made the fetch into these slots already."""
    return slots.data_ptr() in _made_first


def end_of(slots: Tensor) -> Any:
    """The event behind that fetch; None where there is none."""
    return _made_first.get(slots.data_ptr())


class Deferred:
    """What a session's last replay has left undone.

    fetches: rows → those that a replay of so many leaves; None: those of the rows that there are.
    owed: a replay has left them, and nobody has made them since.
    """

    def __init__(self, fetches: Callable[[int | None], Sequence[Fetch]] = lambda rows: ()) -> None:
        self.fetches = fetches
        self.owed = False

    def make(self) -> None:
        """Before anything but another replay."""
        if self.owed:
            self.owed = False
            for fetch in self.fetches(None):
                torch.ops.specache.prefetch(*fetch)

    def drop(self) -> None:
        """After a step that failed: it may have chosen tokens that, without it, are still in the window."""
        self.owed = False
