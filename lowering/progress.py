"""Tell a person what is being compiled, and how far it is: in a line on a terminal, and in the log.

The line is on stderr and disappears when its graph is done. The log is `logging`'s, at INFO under this module's name.
`TORCH_LOGS=+specache_compile.lowering.progress` shows it, as does any configuration of `logging`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar

from tqdm import tqdm

log = logging.getLogger(__name__)
# The graph that is being compiled, and its line.
current: ContextVar[tuple[str, tqdm] | None] = ContextVar("current", default=None)


@contextlib.contextmanager
def compiling(graph: str) -> Iterator[None]:
    """Within it, `tell` reports on this graph."""
    start = time.perf_counter()
    heading = {"desc": f"specache: compiling {graph}", "bar_format": "{desc}{postfix} [{elapsed}]"}
    with tqdm(file=sys.stderr, disable=None, leave=False, **heading) as line:  # None: not where there is no terminal
        before = current.set((graph, line))
        try:
            yield
        finally:
            current.reset(before)
    log.info("compiled %s in %.1f s", graph, time.perf_counter() - start)


def tell(doing: str) -> None:
    """Report what is done next for the graph that is being compiled."""
    now = current.get()
    if now is not None:
        graph, line = now
        line.set_postfix_str(doing)
        log.info("compiling %s: %s", graph, doing)
