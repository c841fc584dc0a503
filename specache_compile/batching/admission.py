"""Which of the waiting requests may begin: first come, first served."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .request import Request

# Later requests, for which there is room, that may begin before one for which there is none.
OVERTAKEN = 8


def next_to_start(waiting: Sequence[Request], fits: Callable[[Request], bool]) -> Request | None:
    """The oldest waiting request that there is room for. None: there is none, or it would be one too many
    to overtake an older one."""
    for place, request in enumerate(waiting):
        if fits(request):
            for older in waiting[:place]:
                older.overtaken += 1
            return request
        if request.overtaken >= OVERTAKEN:
            return None
    return None
