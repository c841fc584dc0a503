"""Print on stderr which graph is compiling, and the seconds it took. TQDM_DISABLE=1 disables the lines."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator

log = logging.getLogger(__name__)


@contextlib.contextmanager
def compiling(graph: str, how: str) -> Iterator[None]:
    """Within this context, this graph is compiled.

    how: the option lowering; only "inductor" takes long enough for lines on stderr.
    """
    start, prints = time.perf_counter(), how == "inductor" and os.environ.get("TQDM_DISABLE", "") in ("", "0")
    if prints:
        print(f"specache: compiling {graph}, first run only", file=sys.stderr, flush=True)
    yield
    seconds = time.perf_counter() - start
    log.info("compiled %s in %.1f s", graph, seconds)
    if prints:
        print(f"specache: compiled {graph} in {seconds:.1f} s", file=sys.stderr, flush=True)
