"""The rewritten forms of a captured graph: one for each phase and set of options, made when it is needed."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from specache_compile.errors import SpecacheError, warn
from specache_compile.kernels.state.cursor import CURSOR_SIZE, new_cursor
from specache_compile.kernels.state.page_table import PAGE
from specache_compile.lowering import cuda_graphs
from specache_compile.lowering.late import compile_lock, guards, made_late, made_within_tracing
from specache_compile.lowering.lower import lower
from specache_compile.lowering.progress import compiling, show_step
from specache_compile.lowering.row_buckets import RowDims, row_dims
from specache_compile.methods import METHODS
from specache_compile.passes.pipeline import PIPELINE, Trace, run_pipeline
from specache_compile.passes.plan import Input, RewritePlan
from specache_compile.passes.reading.in_place import written_inputs
from specache_compile.runtime.rewritten import Rewritten
from specache_compile.runtime.state import fields_of
from specache_compile.runtime.variant import Variant, selects

from .captured import Captured

_graph_numbers = itertools.count()
# Called with each graph that was rewritten, and for what: `entry.py` puts the dump here.
observers: list[Callable[[Rewrites, Variant], object]] = []


class Rewrites:
    """The rewritten forms that one captured graph has so far.

    name: the graph's, in dumps and messages.
    made: the forms.
    guarded: the number of statements about the graph's sizes that Dynamo checks; None while Dynamo compiles.
    told_one_lane: a person has been told why a decode runs one lane.
    kept: the folder in which later processes find the forms; None: they do not.
    """

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.name = f"graph{next(_graph_numbers)}"
        self.made: dict[Variant, Rewritten] = {}
        self.guarded: int | None = None
        self.told_one_lane = False
        self.kept: Path | None = None

    def form(self, variant: Variant, arguments: Sequence[Any]) -> Rewritten:
        """The graph rewritten for `variant`; SpecacheError where the sizes of this call are not what it assumes."""
        rewritten = self.get(variant)
        for assumed in rewritten.assumes:
            if not self.captured.symbols.holds(assumed, arguments):
                raise other_sizes(assumed)
        return rewritten

    def get(self, variant: Variant, ahead: bool = False) -> Rewritten:
        """The graph rewritten for `variant`; compiled on first use, `ahead` while Dynamo still listens."""
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
        self.tell_one_lane(self.made[variant].one_lane)
        for observe in observers:
            observe(self, variant)

    def tell_one_lane(self, reason: str | None) -> None:
        """Say once that a decode runs without the speculative token, and why."""
        if reason is not None and not self.told_one_lane:
            self.told_one_lane = True
            warn(one_lane(reason))

    def late(self, make: Callable[[], Rewritten]) -> Rewritten:
        """A form made where a generation runs, with all that it may assume and Dynamo does not check."""
        rewritten = made_late(self.captured.fake_mode, make)
        assumed = tuple(dict.fromkeys(guards(self.captured.fake_mode)[self.guarded :]))
        for statement in assumed:
            if not self.captured.symbols.can_read(statement):
                raise unchecked_sizes(statement)
        return replace(rewritten, assumes=assumed)

    @property
    def modules(self) -> dict[str, GraphModule]:
        """The newest graph of each phase."""
        return {variant.phase.name: made.graph_module for variant, made in self.made.items()}

    @property
    def traces(self) -> list[Trace]:
        return [made.trace for made in self.made.values()]


def rewrite(captured: Captured, variant: Variant, name: str) -> Rewritten:
    """Run the passes over a copy of the captured graph, and lower the result; for any batch where Dynamo's is free."""
    fakes = StateFakes(captured, variant)
    graph_module = GraphModule(captured.graph_module, copy.deepcopy(captured.graph_module.graph))
    plan = plan_of(captured, variant, fakes, graph_module.graph)
    show_step("passes")
    passes = [p for p in PIPELINE if p.__name__ not in captured.options.disable_passes]
    graph_module, trace = run_pipeline(graph_module, plan, passes, name)
    patches = {**cuda_graphs.NO_TREES, **captured.options.inductor}
    how = captured.options.lowering
    once = variant.phase.once and not variant.options.drafts  # else it runs before each draft
    how = "op by op" if how == "inductor" and once else how
    run = lower(graph_module, [fakes.of(i) for i in plan.inputs], how, patches, captured.mode)
    recorded = is_to_capture(captured.mode, graph_module, plan)
    return Rewritten(
        variant, run, graph_module, tuple(plan.inputs), plan.held_outputs, plan.guesses, plan.lanes, recorded, trace,
        plan.one_lane, plan.counts_positions, writes=written_inputs(graph_module) if recorded else frozenset(),
        rows=rows_to_fill_up(captured, graph_module, plan) if recorded else None,
    )  # fmt: skip


def rows_to_fill_up(captured: Captured, graph_module: GraphModule, plan: RewritePlan) -> RowDims | None:
    """Where a recorded step has rows; None where dead ones may not fill them up, or no call shows whether they may."""
    dims = row_dims(graph_module, plan)
    return dims if dims is not None and all(map(captured.symbols.can_read, dims.assumed)) else None


class StateFakes:
    """Fakes of what a session will bind, in Dynamo's fake mode, with Dynamo's symbol for the batch.

    arguments: of the graph's caller.
    state: each layer's state tensors by field.
    """

    def __init__(self, captured: Captured, variant: Variant) -> None:
        batch, layers = captured.batch, captured.layers
        device, options = layers[0].device, variant.options
        columns: Any = CURSOR_SIZE
        capacity: Any = variant.capacity
        pages: Any = captured.free_pages() if variant.paged else 0
        if variant.paged:
            columns = captured.free_columns() if capacity is None else CURSOR_SIZE + capacity // PAGE
            capacity = (columns - CURSOR_SIZE) * PAGE
        elif capacity is None:
            capacity = captured.free_capacity(fields_of(options, layers[0]))
        self.arguments = captured.fakes
        with captured.fake_mode:
            self.state = [
                {
                    field.name: torch.empty(
                        field.shape(options, layer, pages, PAGE)
                        if variant.paged and field.by_page
                        else field.shape(options, layer, batch, capacity),
                        dtype=field.dtype(options, layer), device=field.device(layer),
                    )
                    for field in fields_of(options, layer)
                }
                for layer in layers
            ]  # fmt: skip
            self.cursor = new_cursor(device, batch, columns - CURSOR_SIZE)
            self.guess = torch.empty(batch, 1, dtype=torch.int64, device=device)
            self.padding = torch.empty(batch, 1, 1, capacity, dtype=torch.bool, device=device)
            self.counted = torch.empty(captured.tokens, batch, 1, 1, dtype=torch.float32, device=device)

    def of(self, source: Input) -> Any:
        """The fake of one graph input."""
        if source.source == "argument":
            return self.arguments[source.argument]
        if source.source == "state":
            return self.state[source.site][source.field]
        return getattr(self, source.source)


def plan_of(captured: Captured, variant: Variant, fakes: StateFakes, graph: Graph) -> RewritePlan:
    """What is to be made of `graph`, a copy of the captured one."""
    options = variant.options
    copies = dict(zip(captured.graph_module.graph.nodes, graph.nodes, strict=True))
    sites = [site.moved(copies) for site in captured.sites]
    return RewritePlan(
        phase=variant.phase,
        sites=[replace(site, padding=None) for site in sites] if variant.unpadded else sites,
        selects=selects(options),
        speculate=options.two_lanes,
        hit_rate=options.hit_rate,
        recipe=functools.partial(METHODS[options.method].recipe, options),
        state=fakes.state,
        cursor=fakes.cursor,
        padding=None if variant.ragged else fakes.padding,
        counted=fakes.counted,
        inputs=[Input("argument", argument=i) for i in range(len(captured.placeholders))],
    )


def is_to_capture(mode: str | None, graph_module: GraphModule, plan: RewritePlan) -> bool:
    """With a mode that asks for CUDA graphs, whether this graph gets one; a warning where a decode step cannot."""
    asked = mode in cuda_graphs.MODES and cuda_graphs.captures_on(plan.cursor.device)
    if not (asked and plan.phase.one_token and plan.phase.stores):
        return False
    reason = cuda_graphs.reason_not_to_capture(graph_module, plan)
    if reason is not None:
        warn(f"mode={mode!r}: no CUDA graph of the decode step: {reason}")
    return reason is None


def other_sizes(assumed: object) -> SpecacheError:
    return SpecacheError(
        f"a graph that was compiled while a generation ran is for calls with {assumed}, of Dynamo's symbolic sizes, "
        "and this is another. torch._dynamo.reset() has the next call compile for its own sizes"
    )


def unchecked_sizes(assumed: object) -> SpecacheError:
    return SpecacheError(
        f"a graph that this generation needs would hold only for {assumed}, which no call shows. "
        "torch._dynamo.reset() before a new generation may avoid it; please report it with the model's config"
    )


def one_lane(reason: str) -> str:
    return (
        f"this model's decode runs one token at a time, without the speculative one beside it: {reason}. Its cache is "
        "held and compressed all the same; pairs are fetched for the token before. speculate=False asks for that"
    )
