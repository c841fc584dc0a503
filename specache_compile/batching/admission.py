"""Which of the waiting requests may begin: first come, first served, within the bytes that tiers may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specache_compile.methods.field import LayerShape
from specache_compile.options import MethodOptions
from specache_compile.runtime.state import device_total, predicted_bytes

from .request import Request

# Later requests, for which there is room, that may begin before one for which there is none.
OVERTAKEN = 8


@dataclass(frozen=True)
class Budget:
    """Bytes that all rows may have together, on the device and on the host; None: as many as there are."""

    device: int | None = None
    host: int | None = None


@dataclass(frozen=True)
class Bytes:
    """What tiers take."""

    device: int
    host: int

    def fits(self, budget: Budget) -> bool:
        return all(
            most is None or size <= most for size, most in ((self.device, budget.device), (self.host, budget.host))
        )


def needed(options: MethodOptions, layers: Sequence[LayerShape], lengths: Sequence[int]) -> Bytes:
    """The most bytes that rows take which end with these tokens, the newest last: when it joins.

    A batch's tiers are a rectangle, as long as the longest row. A join copies, so that the rows before, the newest
    alone, and all together are there at once.
    """
    found = [
        predicted_bytes(options, layers, len(rows), max(rows))
        for rows in (lengths, lengths[:-1], lengths[-1:] if len(lengths) > 1 else ())
        if rows
    ]
    return Bytes(sum(map(device_total, found)), sum(tiers["host"] for tiers in found))


def next_to_begin(
    waiting: Sequence[Request], running: Sequence[Request], budget: Budget, options: MethodOptions,
    layers: Sequence[LayerShape],
) -> Request | None:  # fmt: skip
    """The oldest waiting request that there is room for beside those that run, until each ends. None: there is none, or
    it would be one too many to overtake an older one."""
    for place, request in enumerate(waiting):
        lengths = [other.longest for other in running] + [request.longest]
        if needed(options, layers, lengths).fits(budget):
            for older in waiting[:place]:
                older.overtaken += 1
            return request
        if request.overtaken >= OVERTAKEN:
            return None
    return None
