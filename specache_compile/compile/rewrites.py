"""The variants of a captured graph: one rewritten graph for each phase and set of options, compiled when needed."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from specache_compile.errors import SpecacheError
from specache_compile.kernels.state.cursor import CURSOR_SIZE, new_cursor
from specache_compile.kernels.state.page_table import PAGE
from specache_compile.lowering import cuda_graphs
from specache_compile.lowering.late import compile_lock, guards, made_late, made_within_tracing
from specache_compile.lowering.lower import lower
from specache_compile.lowering.progress import compiling
from specache_compile.lowering.row_buckets import row_dims
from specache_compile.methods import METHODS
from specache_compile.passes.pipeline import run_pipeline
from specache_compile.passes.plan import Input, RewritePlan
from specache_compile.passes.reading.in_place import written_inputs
from specache_compile.passes.reading.nodes import hint
from specache_compile.runtime.records import record_of
from specache_compile.runtime.rewritten import Rewritten, Variant, selects
from specache_compile.runtime.state import bucket, fields_of

from .captured import Captured

_graph_numbers = itertools.count()
# Called with each graph that was rewritten, and its variant: `warm/hooks.py` stores it.
observers: list[Callable[[Rewrites, Variant], object]] = []


class Rewrites:
    """The variants of one captured graph that are compiled so far.

    name: of the graph, in dumps and messages.
    made: rewritten graphs by variant.
    guarded: number of conditions on the graph's sizes that Dynamo checks; None while Dynamo compiles.
    kept: the folder in which later processes find the variants; None if they are not stored.
    """

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.name = f"graph{next(_graph_numbers)}"
        self.made: dict[Variant, Rewritten] = {}
        self.guarded: int | None = None
        self.kept: Path | None = None

    def compiled_for(self, variant: Variant, arguments: Sequence[Any]) -> Rewritten:
        """The graph rewritten for `variant`; SpecacheError if it assumes other sizes than this call has."""
        rewritten = self.get(variant)
        for assumed in rewritten.assumes:
            if not self.captured.symbols.holds(assumed, arguments):
                raise SpecacheError(
                    f"this call needs a graph that was compiled during a generation and is valid only for {assumed} "
                    "(symbols of Dynamo's sizes). Call torch._dynamo.reset(), which compiles the next call for its own "
                    "sizes"
                )
        return rewritten

    def get(self, variant: Variant, ahead: bool = False) -> Rewritten:
        """The graph rewritten for `variant`, compiled on first use. ahead: Dynamo is still tracing."""
        if self.guarded is not None and variant in self.made:
            return self.made[variant]
        with compile_lock:
            if self.guarded is None and not ahead:
                self.guarded = len(guards(self.captured.fake_mode))
            if variant not in self.made:
                self.make(variant, ahead)
        return self.made[variant]

    def make(self, variant: Variant, ahead: bool) -> None:
        make = functools.partial(rewrite, self.captured, variant, self.name)
        with compiling(f"{self.name}, {variant.phase}", self.captured.options.lowering):
            self.made[variant] = made_within_tracing(self.captured.fake_mode, make) if ahead else self.late(make)
        warn_of_one_lane(self.made[variant])
        for observe in observers:
            observe(self, variant)

    def late(self, make: Callable[[], Rewritten]) -> Rewritten:
        """Compile a variant during a generation, with the conditions that Dynamo does not check."""
        rewritten = made_late(self.captured.fake_mode, make)
        assumed = tuple(dict.fromkeys(guards(self.captured.fake_mode)[self.guarded :]))
        for statement in assumed:
            if not self.captured.symbols.can_read(statement):
                raise SpecacheError(
                    f"a graph that this generation needs is valid only for {statement}, which no argument of a call "
                    "shows. Call torch._dynamo.reset() before the next generation, and please report this error with "
                    "the model's config"
                )
        return replace(rewritten, assumes=assumed)

    @property
    def modules(self) -> dict[str, GraphModule]:
        """The newest graph of each phase."""
        return {variant.phase.name: made.graph_module for variant, made in self.made.items()}


def rewrite(captured: Captured, variant: Variant, name: str) -> Rewritten:
    """Run the passes on a copy of the captured graph, and lower the result."""
    state, own = state_fakes(captured, variant)
    graph_module = GraphModule(captured.graph_module, copy.deepcopy(captured.graph_module.graph))
    plan = plan_of(captured, variant, state, own, graph_module.graph)
    graph_module, stages = run_pipeline(graph_module, plan, name)
    how = captured.options.lowering
    once = variant.phase.once and not variant.options.drafts  # otherwise it runs before each draft
    how = "op by op" if how == "inductor" and once else how
    every: list[Any] = [captured.fakes, own, *state]
    inputs = [every[place][key] for place, key in (each.place for each in plan.inputs)]
    run = lower(graph_module, inputs, how, cuda_graphs.NO_TREES, captured.mode)
    recorded = is_to_capture(captured.mode, graph_module, plan)
    rows = row_dims(graph_module, plan) if recorded else None
    if rows is not None and not all(map(captured.symbols.can_read, rows.assumed)):
        rows = None
    return Rewritten(
        variant, run, graph_module, tuple(plan.inputs), plan.held_outputs, plan.speculates, plan.lanes, recorded,
        stages, plan.one_lane, plan.counts_positions, writes=written_inputs(graph_module), rows=rows,
    )  # fmt: skip


def state_fakes(captured: Captured, variant: Variant) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Fake tensors in Dynamo's fake mode, with its symbol for the batch: each layer's state tensors by field, and the
    session's other tensors by the source of an `Input`."""
    batch, layers, options, fixed = captured.batch, captured.layers, variant.options, variant.capacity
    tokens = hint(captured.past) + hint(captured.tokens)
    pages: Any = captured.free_size("pages", 32)
    columns: Any = CURSOR_SIZE + (bucket(tokens) if fixed is None else fixed) // PAGE
    if fixed is None:
        columns = captured.free_size("columns", columns, CURSOR_SIZE + 1)
    capacity = (columns - CURSOR_SIZE) * PAGE
    with captured.fake_mode:
        state = [
            {
                field.name: torch.empty(
                    field.shape(options, layer, *((pages, PAGE) if field.by_page else (batch, capacity))),
                    dtype=field.dtype(options, layer), device=field.device(layer),
                )
                for field in fields_of(options, layer)
            }
            for layer in layers
        ]  # fmt: skip
        return state, {
            "cursor": new_cursor(layers[0].device, batch, columns - CURSOR_SIZE),
            "speculative": torch.empty(batch, 1, dtype=torch.int64, device=layers[0].device),
            "padding": torch.empty(batch, 1, 1, capacity, dtype=torch.bool, device=layers[0].device),
        }


def plan_of(
    captured: Captured, variant: Variant, state: list[dict[str, Any]], own: Mapping[str, Any], graph: Graph
) -> RewritePlan:
    """The plan for `graph`, a copy of the captured graph, over the fakes of `state_fakes`."""
    options = variant.options
    copies = dict(zip(captured.graph_module.graph.nodes, graph.nodes, strict=True))
    sites = [site.moved(copies) for site in captured.sites]
    return RewritePlan(
        phase=variant.phase,
        sites=[replace(site, padding=None) for site in sites] if variant.unpadded else sites,
        selects=selects(options),
        speculate=options.two_lanes,
        recipe=functools.partial(METHODS[options.method].recipe, options),
        state=state,
        cursor=own["cursor"],
        padding=None if variant.ragged else own["padding"],
        inputs=[Input("argument", argument=i) for i in range(len(captured.placeholders))],
    )


def is_to_capture(mode: str | None, graph_module: GraphModule, plan: RewritePlan) -> bool:
    """Whether to record this graph as a CUDA graph, as `mode` requests; warns if a decode step cannot be recorded."""
    requested = mode in cuda_graphs.MODES and cuda_graphs.captures_on(plan.cursor.device)
    if not (requested and plan.phase.one_token and plan.phase.stores):
        return False
    reason = cuda_graphs.reason_not_to_capture(graph_module, plan)
    if reason is not None:
        record_of(()).warn_once(f"mode={mode!r}: the decode step runs without a CUDA graph: {reason}")
    return reason is None


def warn_of_one_lane(made: Rewritten) -> None:
    """Warn, once for the running model, that its decode lacks the speculative token that the options request."""
    if made.one_lane is not None:
        text = (
            f"this model's decode runs one token at a time, without the speculative token: {made.one_lane}. The cache "
            "is compressed as usual, and each step prefetches the pairs that the previous token selects. Pass "
            "speculate=False to silence this warning"
        )
        record_of(()).warn_once(text, "one lane")
