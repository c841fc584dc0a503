"""Operands that ops have in common, as named tuples: an op's schema lists the fields one by one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from .layout import Layout, StoredTiers

R = TypeVar("R")


class AttentionInputs(NamedTuple):
    """What an attention of new tokens takes, whatever it attends to.

    q: [B, Hq, T, d].
    k, v: the new tokens' pairs [B, H, T, d], causal between the tokens.
    mask: bool (True: visible) or additive [B|1, Hq|1, T|1, ≥ n + T]; column t is token t of the cache, and in a decode
        column n is every new token. None: only causality.
    sinks: [Hq], or None.
    cursor: int64 [B, 3 ...] (`cursor.py`).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    sinks: Tensor | None
    cursor: Tensor


class TierInputs(NamedTuple):
    """How a decode attends over the tiers.

    tiers, layout: lists among an op's operands.
    """

    tiers: StoredTiers
    layout: Layout
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, tiers: Sequence[Tensor], layout: Sequence[int], scale: float, softcap: float | None) -> TierInputs:
        return cls(StoredTiers(*tiers), Layout(*layout), scale, softcap)


def takes(**kinds: Any) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorate an implementation, to call it with an op's operands one by one.

        @takes(new=AttentionInputs)          attend(q, k, v, mask, sinks, cursor, host)
        def attend(new, host): ...

    kinds: parameters → named tuples. Each takes the place of its fields, in their order.
    """

    def decorate(run: Callable[..., R]) -> Callable[..., R]:
        names: list[str] = []
        places: list[tuple[Any, slice]] = []
        for name in inspect.signature(run).parameters:
            fields = kinds[name]._fields if name in kinds else (name,)
            places.append((kinds.get(name), slice(len(names), len(names) + len(fields))))
            names += fields

        @functools.wraps(run)
        def call(*operands: Any) -> R:
            if len(operands) > len(names):
                raise TypeError(f"{len(operands)} operands for {names}")
            arguments: list[Any] = []
            for kind, place in places:
                values = operands[place]
                if kind is None or not values:
                    arguments += values
                else:
                    arguments.append(getattr(kind, "of", kind)(*values))
            return run(*arguments)

        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return call

    return decorate
