"""Print on stderr which graph is compiling, and the seconds it took. TQDM_DISABLE=1 disables the lines.

`logging` gets the steps in between too, at INFO under this module's name.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar

log = logging.getLogger(__name__)
# The graph that is compiling.
current: ContextVar[str | None] = ContextVar("current", default=None)


@contextlib.contextmanager
def compiling(graph: str, how: str) -> Iterator[None]:
    """Within this context, `show_step` reports on this graph.

    how: the option lowering; only "inductor" takes long enough for lines on stderr.
    """
    start, prints = time.perf_counter(), how == "inductor" and os.environ.get("TQDM_DISABLE", "") in ("", "0")
    if prints:
        print(f"specache: compiling {graph}, first run only", file=sys.stderr, flush=True)
    before = current.set(graph)
    try:
        yield
    finally:
        current.reset(before)
    seconds = time.perf_counter() - start
    log.info("compiled %s in %.1f s", graph, seconds)
    if prints:
        print(f"specache: compiled {graph} in {seconds:.1f} s", file=sys.stderr, flush=True)


def show_step(step: str) -> None:
    """Log the next step of the graph that is compiling."""
    if (graph := current.get()) is not None:
        log.info("compiling %s: %s", graph, step)
