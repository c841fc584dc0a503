"""The inputs of a rewritten graph, bound once to a session's tensors. A step replaces what each call passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from specache_compile.methods.field import LayerState
from specache_compile.passes.plan import Input
from specache_compile.passes.reading.local_shards import local


@dataclass(frozen=True)
class BoundInputs:
    """Inputs of one rewritten graph for a session's state and cursor.

    state: another list requires a new binding, as another cursor does.
    values: the inputs; None at the places below.
    arguments: (place, position among the caller's arguments). shards: those that are DTensors.
    own: (place, name of a session's tensor that may be another one in each step).
    """

    state: list[LayerState]
    values: list[Any]
    arguments: tuple[tuple[int, int], ...]
    shards: tuple[tuple[int, int], ...]
    own: tuple[tuple[int, str], ...]

    def of_call(self, arguments: Sequence[Any], own: Mapping[str, Any]) -> list[Any]:
        """The inputs of one call, in a new list."""
        values = self.values.copy()
        for place, position in self.arguments:
            values[place] = arguments[position]
        for place, position in self.shards:
            values[place] = local(arguments[position])
        for place, name in self.own:
            values[place] = own[name]
        return values


def bind(inputs: Sequence[Input], state: list[LayerState], cursor: Tensor, arguments: Sequence[Any]) -> BoundInputs:
    """Bind a graph's inputs. arguments: of a call; Dynamo's guards keep the class of each."""
    values: list[Any] = [None] * len(inputs)
    own, given, shards = list[tuple[int, str]](), list[tuple[int, int]](), list[tuple[int, int]]()
    for place, source in enumerate(inputs):
        if source.source == "argument":
            sharded = isinstance(arguments[source.argument], DTensor)
            (shards if sharded else given).append((place, source.argument))
        elif source.source == "state":
            values[place] = state[source.site][source.field]
        elif source.source == "cursor":
            values[place] = cursor
        else:
            own.append((place, source.source))
    return BoundInputs(state, values, tuple(given), tuple(shards), tuple(own))
