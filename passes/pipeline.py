"""The passes in their order, and the runner that times, checks, dumps and traces each of them."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch._logging import trace_structured
from torch.fx import GraphModule

from .causal_prefill import causal_prefill
from .clean_up import clean_up
from .context import Context, Pass, PassReport
from .cursor_lengths import cursor_lengths
from .find_attention import find_attention
from .fingerprint import graph_hash
from .overlap import overlap
from .own_cache import own_cache
from .prefetch import prefetch
from .rewrite_attention import rewrite_attention
from .speculate import speculate
from .store import store

PIPELINE: tuple[Pass, ...] = (
    find_attention,
    own_cache,
    rewrite_attention,
    causal_prefill,
    cursor_lengths,
    speculate,
    store,
    prefetch,
    overlap,
    clean_up,
)
PASS_NAMES = tuple(p.__name__ for p in PIPELINE)
# Without one of these a graph cannot hold its own cache: it is then left as Hugging Face wrote it.
ESSENTIAL = ("find_attention", "own_cache", "rewrite_attention", "store")

log = logging.getLogger(__name__)


@dataclass
class Trace:
    """One run of the pipeline: the readable graph before it and after each pass, the passes' reports, and the hash of
    the graph that it handed over to be lowered."""

    phase: str
    graphs: dict[str, str] = field(default_factory=dict)
    reports: list[PassReport] = field(default_factory=list)
    hash: str = ""


def run_pipeline(
    graph_module: GraphModule, context: Context, passes: Sequence[Pass] = PIPELINE, name: str = "graph"
) -> tuple[GraphModule, Trace]:
    """Run `passes` in order on `graph_module` (which they may change); checks the graph after each.

    With SPECACHE_DUMP=dir in the environment, writes dir/<name>.<phase>/NN_<pass>.py before and after; every pass
    also leaves a structured trace that `tlparse` shows.
    """
    trace = Trace(context.phase.name, {"captured": readable(graph_module)})
    dump(name, trace, 0, "captured")
    for number, step in enumerate(passes, start=1):
        start = time.perf_counter()
        graph_module, report = step(graph_module, context)
        graph_module.graph.lint()
        graph_module.recompile()
        report = dataclasses.replace(report, seconds=time.perf_counter() - start)
        trace.reports.append(report)
        trace.graphs[report.name] = readable(graph_module)
        dump(name, trace, number, report.name)
        log.debug("%s %s: %s %s", context.phase, report.name, report.counts, "; ".join(report.remarks))
    trace.hash = graph_hash(graph_module)
    return graph_module, trace


def readable(graph_module: GraphModule) -> str:
    return graph_module.print_readable(print_output=False)


def dump(name: str, trace: Trace, number: int, step: str) -> None:
    """The graph after a pass, to SPECACHE_DUMP and to torch's structured trace."""
    label = f"specache_{name}_{trace.phase}_{number:02d}_{step}"
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": label, "encoding": "string"},
        payload_fn=lambda: trace.graphs[step],
    )
    folder = os.environ.get("SPECACHE_DUMP")
    if folder:
        target = Path(folder) / f"{name}.{trace.phase}" / f"{number:02d}_{step}.py"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(trace.graphs[step])
