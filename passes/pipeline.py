"""The passes in their order, and the runner that times, checks, dumps and traces each of them."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from torch._logging import trace_structured
from torch.fx import GraphModule

from .causal_prefill import causal_prefill
from .clean_up import clean_up
from .correct import correct
from .cursor_lengths import cursor_lengths
from .overlap import overlap
from .own_cache import own_cache
from .plan import Pass, RewritePlan
from .prefetch import prefetch
from .rewrite_attention import rewrite_attention
from .speculate import speculate
from .store_pairs import store

PIPELINE: tuple[Pass, ...] = (
    own_cache,
    rewrite_attention,
    causal_prefill,
    cursor_lengths,
    speculate,
    store,
    prefetch,
    correct,
    overlap,
    clean_up,
)

log = logging.getLogger(__name__)
_keep_stages: ContextVar[bool] = ContextVar("_keep_stages", default=False)


def run_pipeline(
    graph_module: GraphModule, plan: RewritePlan, name: str = "graph"
) -> tuple[GraphModule, dict[str, GraphModule]]:
    """Run the passes in order on `graph_module`, which they may change, and check the graph after each.

    SPECACHE_DUMP=dir writes dir/<name>.<phase>/NN_<pass>.py before and after each pass. `tlparse` shows the same
    graphs from torch's structured trace.

    Returns: the final graph, whose code is not generated yet (`recompile`); and, within `keeping_stages`, copies of
        the graph before the run ("captured") and after each pass.
    """
    stages: dict[str, GraphModule] = {}
    show(name, plan, stages, 0, "captured", graph_module)
    for number, step in enumerate(PIPELINE, start=1):
        start = time.perf_counter()
        graph_module = step(graph_module, plan)
        graph_module.graph.lint()
        log.debug("%s %s: %.3f s", plan.phase, step.__name__, time.perf_counter() - start)
        show(name, plan, stages, number, step.__name__, graph_module)
    return graph_module, stages


@contextlib.contextmanager
def keeping_stages() -> Iterator[None]:
    """Within this context every run keeps a copy of the graph after each pass."""
    before = _keep_stages.set(True)
    try:
        yield
    finally:
        _keep_stages.reset(before)


def readable(graph_module: GraphModule) -> str:
    return graph_module.print_readable(print_output=False)


def show(
    name: str, plan: RewritePlan, stages: dict[str, GraphModule], number: int, step: str, graph_module: GraphModule
) -> None:
    """Record the graph after a pass in `stages`, the SPECACHE_DUMP folder and torch's structured trace."""
    label = f"specache_{name}_{plan.phase}_{number:02d}_{step}"
    text = functools.cache(lambda: readable(graph_module))
    trace_structured("artifact", metadata_fn=lambda: {"name": label, "encoding": "string"}, payload_fn=text)
    folder = os.environ.get("SPECACHE_DUMP")
    if folder:
        target = Path(folder) / f"{name}.{plan.phase}" / f"{number:02d}_{step}.py"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text())
    if _keep_stages.get():
        stages[step] = GraphModule(graph_module, copy.deepcopy(graph_module.graph))
