"""The torch.compile backend: find sites, decide the phase, and give Dynamo a callable that binds sessions.

The story of one call: `specache` receives a captured graph; `CapturedGraph` knows its sites and its phase; when it is
called, it finds the session behind the held tensors, makes room, runs the rewritten graph specialised for that
session's state, and hands back held tensors of the new length.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule

from specache_compile.lowering import cuda_graphs
from specache_compile.lowering.lower import lower, within_tracing
from specache_compile.lowering.progress import compiling, tell
from specache_compile.passes.context import Context, Input, LeftAlone, Phase, value_of
from specache_compile.passes.find_attention import find_attention
from specache_compile.passes.known_sizes import fill_in_sizes
from specache_compile.passes.pipeline import ESSENTIAL, PASS_NAMES, PIPELINE, Trace, run_pipeline

from .dump import dump_explanation
from .errors import OptionError, SpecacheError, SpecacheWarning, copy_failed, mixed_caches, unmatched_held
from .free_sizes import free_sizes
from .held import Handle, HeldTensor
from .methods import METHODS
from .methods.method import COMMON
from .options import Options, parse_options
from .records import ModelRecord, record_of
from .session import Session
from .symbols import SymbolReader
from .tiers import LayerShape, device_of, state_shapes

_graph_numbers = itertools.count()


def specache(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph that Dynamo captured. Registered as the backend "specache"; see `Options` for `options`."""
    try:
        parsed = parse_options(options)
        for name in parsed.disable_passes:
            if name not in PASS_NAMES:
                names = ", ".join(PASS_NAMES)
                raise OptionError(f"option disable_passes: unknown pass {name!r}; the passes are {names}")
        return compile_graph(graph_module, example_inputs, parsed, mode)
    except SpecacheError as error:
        return refusal(error)


def refusal(error: SpecacheError) -> Callable[..., Any]:
    """What Dynamo calls in place of a refused graph. Raised while it compiles, the error would come out as Dynamo's."""
    kind, said = type(error), error.args  # not the error itself, whose traceback holds the graph

    def refuse(*arguments: Any) -> NoReturn:
        raise kind(*said)

    return refuse


def compile_graph(
    graph_module: GraphModule, example_inputs: Sequence[Any], options: Options, mode: str | None = None
) -> Callable[..., Any]:
    """A callable for one captured graph: rewritten where it has sites, as Hugging Face wrote it where not."""
    graph = CapturedGraph(graph_module, options, mode)
    if graph.sites:
        free_sizes(graph.placeholders, graph.fakes, example_inputs)
    warn_left_alone(graph.left_alone, len(graph.sites))
    if graph.sites:
        graph.compile_ahead()
        return graph
    kept = graph.drop_unread_held()
    inputs = [example_inputs[i] for i in kept]
    lowered = lower(graph_module, inputs, options.lowering, options.inductor, graph.mode)
    return (lambda *arguments: lowered(*(arguments[i] for i in kept))) if graph.held else lowered


def warn_left_alone(left_alone: Sequence[LeftAlone], rewritten: int) -> None:
    """One warning that says how many attentions stay as Hugging Face wrote them, and why."""
    if not left_alone:
        return
    reasons: dict[str, list[str]] = {}
    for item in left_alone:
        reasons.setdefault(item.reason, []).append(item.node)
    told = "; ".join(f"{len(nodes)} ({nodes[0]}, ...): {reason}" for reason, nodes in reasons.items())
    message = f"specache rewrote {rewritten} attentions of this graph and left {len(left_alone)} exact: {told}"
    warnings.warn(message, SpecacheWarning, stacklevel=2)


def reason_to_leave_alone(inputs: Sequence[Any], options: Options) -> str | None:
    """Why no site of a graph may be rewritten, whatever it holds."""
    disabled = [name for name in ESSENTIAL if name in options.disable_passes]
    if disabled:
        return f"pass {disabled[0]} is disabled"
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        return "gradients are enabled: call the model under torch.no_grad() or torch.inference_mode()"
    return None


class CapturedGraph:
    """One graph from Dynamo, and its rewritten forms, one for each phase variant and shape of the state.

    Callable with Dynamo's arguments; returns what the captured graph would, held tensors in place of the cache.
    """

    def __init__(self, graph_module: GraphModule, options: Options, mode: str | None) -> None:
        self.graph_module, self.options, self.mode = graph_module, options, mode or options.mode
        self.placeholders = graph_module.graph.find_nodes(op="placeholder")
        # Dynamo's own fakes: the inputs it passes are real, and its tracing context has another fake mode.
        self.fakes = [value_of(node) for node in self.placeholders]
        self.fake_mode: Any = next((fake.fake_mode for fake in self.fakes if isinstance(fake, FakeTensor)), None)
        self.held = [i for i, fake in enumerate(self.fakes) if isinstance(fake, HeldTensor)]
        self.masks: dict[str, tuple[bool, str | None]] = {}
        self.find_sites()
        self.symbols = SymbolReader(self.fakes)
        self.lowered: dict[tuple[Any, ...], tuple[Callable[..., Any], Context]] = {}
        self.traces: list[Trace] = []
        self.modules: dict[str, GraphModule] = {}
        self.record: ModelRecord | None = None
        self.compiles = 0

    def find_sites(self) -> None:
        """Look for sites and decide the phase: no past, past and one token, or past and several."""
        fill_in_sizes(self.graph_module)
        context = self.new_context("prefill", self.options, state=[])
        reason = reason_to_leave_alone(self.fakes, self.options)
        if reason is None:
            find_attention(self.graph_module, context)
        else:
            context.left_alone.append(LeftAlone("every site", reason))
        self.sites, self.left_alone = context.sites, context.left_alone
        pasts = [node for site in self.sites for node in (site.past_k, site.past_v) if node is not None]
        if pasts and len(pasts) != 2 * len(self.sites):
            raise SpecacheError("some layers of this cache are filled and others empty: use one cache for one model")
        if self.sites and len(pasts) != len(self.held):
            raise unmatched_held(self.left_alone)
        self.phase: Phase = "prefill"
        if pasts:
            tokens = value_of(self.sites[0].q).shape[2]
            self.phase = "decode" if isinstance(tokens, int) and tokens == 1 else "extend"
        index = {node: i for i, node in enumerate(self.placeholders)}
        names = [node.name for node in self.placeholders]
        self.padding = None if context.padding_mask is None else names.index(context.padding_mask)
        self.pasts = [(index[s.past_k], index[s.past_v]) for s in self.sites if s.past_k is not None]

    def drop_unread_held(self) -> list[int]:
        """Drop held inputs that a graph without sites takes only for their length (a graph break makes such graphs);
        returns the inputs that remain. One that is read is an error."""
        graph = self.graph_module.graph
        for node in (self.placeholders[i] for i in self.held):
            if any(user.users or user.op == "output" for user in node.users):
                raise unmatched_held(self.left_alone)
            for dead in (*node.users, node):
                graph.erase_node(dead)
        self.graph_module.recompile()
        return [i for i in range(len(self.placeholders)) if i not in self.held]

    def new_context(
        self, phase: Phase, options: Options, state: list[dict[str, Any]], cursor: Any = None, padding: Any = None
    ) -> Context:
        return Context(
            phase=phase,
            top_k=0 if "prefetch" in options.disable_passes else options.top_k,
            speculate=options.speculate,
            hit_rate=options.hit_rate,
            recipe=functools.partial(METHODS[options.method].recipe, options),
            state=state,
            cursor=cursor,
            padding=padding,
            masks=self.masks,
            exact=frozenset(options.exact_layers),
            held=frozenset(self.placeholders[i].name for i in self.held),
            inputs=[Input("argument", argument=i) for i in range(len(self.placeholders))],
        )

    def compile_ahead(self) -> None:
        """Lower while Dynamo is still listening, for the state that the first call will have."""
        self.name = f"graph{next(_graph_numbers)}"
        k = value_of(self.sites[0].k)
        batch, tokens = self.symbols.hint(k.shape[0]), self.symbols.hint(k.shape[2])
        past = self.symbols.hint(self.fakes[self.held[0]].shape[2]) if self.held else 0
        # A budget that is a rate was fixed by the prompt, which the past is in the first step after it.
        session = Session(self.options.for_prompt(past or tokens), self.layer_shapes(), batch)
        session.start_for(past + tokens)
        session.capacity_for(past + tokens)
        for phase in self.phases(session.options):
            self.specialise(session, phase, ahead=True)

    def phases(self, options: Options) -> tuple[Phase, ...]:
        if self.phase == "decode" and options.top_k:
            return ("pre-decode", "decode")
        return (self.phase,)

    def layer_shapes(self) -> list[LayerShape]:
        return [
            LayerShape(site.heads, site.head_dim, value_of(site.k).dtype, value_of(site.k).device, site.layer)
            for site in self.sites
        ]

    def specialise(self, session: Session, phase: Phase, ahead: bool = False) -> tuple[Callable[..., Any], Context]:
        """The rewritten graph for this phase and the shapes of this session's state; compiled on first use."""
        key = phase, session.capacity, session.options
        if key not in self.lowered:
            with compiling(f"{self.name}, {phase}"):
                self.lowered[key] = within_tracing(self.fake_mode, lambda: self.rewrite(session, phase), late=not ahead)
            if phase == self.phase:
                dump_explanation(self, session)
        return self.lowered[key]

    def rewrite(self, session: Session, phase: Phase) -> tuple[Callable[..., Any], Context]:
        """Run the passes over a copy of the captured graph, and lower the result; for any batch, if Dynamo's is."""
        self.compiles += 1
        batch = value_of(self.sites[0].k).shape[0]
        with self.fake_mode:
            state = [
                {
                    field: torch.empty(shape, dtype=dtype, device=device_of(field, layer))
                    for field, (shape, dtype) in state_shapes(session.options, layer, batch, session.capacity).items()
                }
                for layer in session.layers
            ]
            cursor = torch.empty(session.cursor.shape, dtype=session.cursor.dtype, device=session.cursor.device)
            device = session.layers[0].device
            guess = torch.empty(batch, 1, dtype=torch.int64, device=device)
            padding = torch.empty(batch, 1, 1, session.capacity, dtype=torch.bool, device=device)
        context = self.new_context(phase, session.options, state, cursor, padding)
        graph_module = GraphModule(self.graph_module, copy.deepcopy(self.graph_module.graph))
        tell("passes")
        passes = [p for p in PIPELINE if p.__name__ not in self.options.disable_passes]
        graph_module, trace = run_pipeline(graph_module, context, passes, self.name)
        self.decide_capture(graph_module, context)
        self.traces.append(trace)
        self.modules[phase] = graph_module
        fakes = {
            "argument": lambda source: self.fakes[source.argument],
            "cursor": lambda source: cursor,
            "state": lambda source: state[source.layer][source.field],
            "padding": lambda source: padding,
            "guess": lambda source: guess,
        }
        inputs = [fakes[source.source](source) for source in context.inputs]
        patches = {**cuda_graphs.NO_TREES, **self.options.inductor}
        return lower(graph_module, inputs, self.options.lowering, patches, self.mode), context

    def decide_capture(self, graph_module: GraphModule, context: Context) -> None:
        """With a mode that asks for CUDA graphs, whether this graph gets one; a warning where a decode step cannot."""
        asked = self.mode in cuda_graphs.MODES and cuda_graphs.captures_on(context.cursor.device)
        if not asked or context.phase != "decode":
            return
        reason = cuda_graphs.reason_not_to_capture(graph_module, context)
        context.capture = reason is None
        if reason is not None:
            warnings.warn(
                f"mode={self.mode!r}: no CUDA graph of the decode step: {reason}", SpecacheWarning, stacklevel=2
            )

    def stop_capturing(self, context: Context, position: int) -> None:
        """From here on a graph's steps run as they are, since the input at `position` moves in every one."""
        context.capture = False
        source = context.inputs[position]
        name = self.placeholders[source.argument].name if source.source == "argument" else source.source
        warnings.warn(
            f"mode={self.mode!r}: no CUDA graph of the decode step any more: input {name}, which is read where it "
            "lies, lies elsewhere in every step. Pass the same tensor each time, or one of at most "
            f"{cuda_graphs.COPIED_BYTES >> 20} MiB, which is copied",
            SpecacheWarning,
            stacklevel=2,
        )

    def __call__(self, *arguments: Any) -> list[Any]:
        start = time.perf_counter()
        session = self.session_for(arguments)
        tokens = self.symbols.value(value_of(self.sites[0].k).shape[2], arguments)
        try:
            outputs, inside = self.step(session, tokens, arguments)
        except BaseException as error:
            session.abandon_step()
            if session.queue.error is not None and isinstance(error, Exception):
                raise copy_failed(session.queue.error) from error
            raise
        session.statistics.count(self.phase, time.perf_counter() - start, inside)
        return outputs

    def step(self, session: Session, tokens: int, arguments: Sequence[Any]) -> tuple[list[Any], float]:
        """Run this graph's phase, after a pre-decode where the slots were not chosen for this step.

        Returns the outputs, and the seconds spent inside the lowered graphs.
        """
        session.move_over(session.length + tokens)
        session.capacity_for(session.length + tokens)
        session.reserve()
        session.point(tokens)
        session.see(None if self.padding is None else arguments[self.padding], session.length + tokens)
        *before, phase = self.phases(session.options)
        inside = 0.0
        guess_is_missing = session.guess is None and self.specialise(session, phase)[1].needs_guess
        if before and (not session.primed or guess_is_missing):
            _, seconds = self.run(session, "pre-decode", arguments)
            inside += seconds
            session.statistics.steps["pre-decode"] += 1
        (outputs, context), seconds = self.run(session, phase, arguments)
        inside += seconds
        session.primed = phase == "decode" and bool(before)
        session.advance(tokens)
        for position, (layer, part) in context.held_outputs.items():
            outputs[position] = session.held(layer, part)
        return outputs, inside

    def run(self, session: Session, phase: Phase, arguments: Sequence[Any]) -> tuple[tuple[list[Any], Context], float]:
        """Run one rewritten graph on the session's state; keeps the guess that it makes."""
        lowered, context = self.specialise(session, phase)
        inputs = session.bind(context.inputs, arguments)
        start = time.perf_counter()
        if context.capture and session.capturable:
            stays = [source.source in ("state", "cursor", "padding") for source in context.inputs]
            give_up = functools.partial(self.stop_capturing, context)
            outputs = session.captured.run(lowered, inputs, stays, session.cursor.device, give_up, session.late_fetches)
        else:
            session.captured.pay(session.late_fetches)
            outputs = list(lowered(*inputs))
        seconds = time.perf_counter() - start
        session.guess = outputs.pop() if context.guesses else None
        return (outputs, context), seconds

    def session_for(self, arguments: Sequence[Any]) -> Session:
        """The session behind the held arguments, brought to the view that they are; a new one in a prefill."""
        if self.phase == "prefill":
            batch = self.symbols.value(value_of(self.sites[0].k).shape[0], arguments)
            session = Session(self.options, self.layer_shapes(), batch)
            session.start_for(self.symbols.value(value_of(self.sites[0].k).shape[2], arguments))
        else:
            handles = [(layer, arguments[i].handle) for layer, past in enumerate(self.pasts) for i in past]
            session = agreed_session(handles)
            if session.asked != self.options and not session.told_of_options:
                session.told_of_options = warn_of_other_options(session.asked, self.options)
        self.record = self.record or record_of(arguments)
        self.record.note(self, session.statistics)
        return session


def warn_of_other_options(made_under: Options, compiled_with: Options) -> bool:
    """A cache goes on as it was made, whichever compiled model it comes to: its tiers hold nothing else. How the model
    is lowered is the model's own. Returns whether there was something to say."""
    differences = ", ".join(
        f"{name} {getattr(made_under, name)!r} (the model's: {getattr(compiled_with, name)!r})"
        for name in (field.name for field in dataclasses.fields(Options))
        if (name == "method" or name not in COMMON) and getattr(made_under, name) != getattr(compiled_with, name)
    )
    if differences:
        warnings.warn(
            "this cache was made with other options than the model is compiled with, and goes on with its own: "
            f"{differences}",
            SpecacheWarning,
            stacklevel=2,
        )
    return bool(differences)


def agreed_session(handles: Sequence[tuple[int, Handle | None]]) -> Session:
    """The one session that all layers' keys and values belong to, in the same version and with the same edits."""
    first = handles[0][1]
    for layer, handle in handles:
        if handle is None or first is None or handle.session is not first.session or handle.layer != layer:
            raise mixed_caches()
        if handle.version != first.version or handle.edits != first.edits:
            raise mixed_caches()
    assert first is not None
    first.session.replay(first.version, first.edits)
    return first.session
