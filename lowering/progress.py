"""Print on stderr which graph is compiling, and the seconds it took. TQDM_DISABLE=1 disables the lines.

A terminal shows the current step in one line. Other outputs get a line at the start and at the end of each graph.
`logging` gets the same steps, at INFO under this module's name.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar

from tqdm import tqdm

log = logging.getLogger(__name__)
# The graph that is compiling, and its progress line.
current: ContextVar[tuple[str, tqdm] | None] = ContextVar("current", default=None)


@contextlib.contextmanager
def compiling(graph: str, how: str) -> Iterator[None]:
    """Within this context, `show_step` reports on this graph.

    how: the option lowering; only "inductor" takes long enough for lines on stderr.
    """
    slow = how == "inductor"
    start = time.perf_counter()
    heading = {"desc": f"specache: compiling {graph}, first run only", "bar_format": "{desc}{postfix} [{elapsed}]"}
    # None disables the line without a terminal
    with tqdm(file=sys.stderr, disable=None if slow else True, leave=False, **heading) as line:
        if slow and line.disable:
            announce(heading["desc"])
        before = current.set((graph, line))
        try:
            yield
        finally:
            current.reset(before)
    seconds = time.perf_counter() - start
    log.info("compiled %s in %.1f s", graph, seconds)
    if slow:
        announce(f"specache: compiled {graph} in {seconds:.1f} s")


def announce(line: str) -> None:
    if os.environ.get("TQDM_DISABLE", "") in ("", "0"):
        print(line, file=sys.stderr, flush=True)


def show_step(step: str) -> None:
    """Show the next step of the graph that is compiling."""
    now = current.get()
    if now is not None:
        graph, line = now
        line.set_postfix_str(step)
        log.info("compiling %s: %s", graph, step)
