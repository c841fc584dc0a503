"""Deferred fetches: fetches that a replay of a recorded step leaves to the next step.

A recorded step must join its copies at its end, which would expose its last layers' fetches. So the next replay makes
them first, during its early layers, or any earlier reader of the slots makes them. A fetch may run at any time, and
again: it copies only selected pairs that the slots lack.
"""

# attend_0, ..., attend_n | join             gather_n with attend_0, ...; wait_n, attend_n | join
# copies: gather_0, ..., gather_n            copies: gather_n, gather_0, ...

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from specache_compile.kernels.state.cursor import host_record

T = TypeVar("T")

# The arguments of a `prefetch`.
Fetch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
FETCH_STATE = ("selected", "host", "slots", "slot_index", "fetched")


def deferrable(state: Sequence[Mapping[str, Tensor]], cursor: Tensor) -> list[Fetch]:
    """Return the fetches of the last quarter of layers, from their state tensors.

    The last fetch before these overlaps a quarter of the step's compute, and these overlap three quarters.
    """
    fetching = [layer for layer in state if "selected" in layer and layer["selected"].numel()]
    return [fetch_arguments(layer, cursor) for layer in last_quarter(fetching)]


def last_quarter(fetching: Sequence[T]) -> Sequence[T]:
    """Return the deferred part of the layers' fetches, in order: nothing for a single layer."""
    late = max(1, len(fetching) // 4) if len(fetching) > 1 else 0
    return fetching[len(fetching) - late :]


def fetch_arguments(state: Mapping[str, Any], cursor: Any) -> Any:
    """Return the arguments of a layer's `prefetch`, as tensors or graph nodes."""
    selected, *rest = (state[field] for field in FETCH_STATE)
    return (selected, cursor, *rest)


@contextmanager
def made_first(fetches: Sequence[Fetch], ended: Callable[[], Any]) -> Iterator[None]:
    """Within this context, a recorded step makes these fetches first, and skips them later.

    ended: returns an event after the newest fetch.
    """
    try:
        for fetch in fetches:
            torch.ops.specache.prefetch(*fetch)
            host_record(fetch[1]).made_first[fetch[3].data_ptr()] = ended()
        yield
    finally:
        for fetch in fetches:
            host_record(fetch[1]).made_first.clear()


class Deferred:
    """The fetches that a session's last replay has deferred.

    fetches: a function from a number of rows to the deferred fetches of a replay; None for the current rows.
    owed: a replay has deferred its fetches, and nothing has made them since.
    """

    def __init__(self, fetches: Callable[[int | None], Sequence[Fetch]] = lambda rows: ()) -> None:
        self.fetches = fetches
        self.owed = False

    def make(self) -> None:
        """Make the deferred fetches, before anything but another replay."""
        if self.owed:
            self.owed = False
            for fetch in self.fetches(None):
                torch.ops.specache.prefetch(*fetch)

    def drop(self) -> None:
        """Drop the deferred fetches after a failed step, which may have selected tokens still in the window."""
        self.owed = False
