"""Selects the waiting request to start next: first come, first served."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .request import Request

# Most later requests that may start before a request that does not fit.
OVERTAKEN = 8


def next_to_start(waiting: Sequence[Request], fits: Callable[[Request], bool]) -> Request | None:
    """The oldest waiting request that fits. None if none fits, or if an older one has been overtaken too often."""
    for place, request in enumerate(waiting):
        if fits(request):
            for older in waiting[:place]:
                older.overtaken += 1
            return request
        if request.overtaken >= OVERTAKEN:
            return None
    return None
