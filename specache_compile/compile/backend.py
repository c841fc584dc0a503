"""The torch.compile backend: takes a graph that Dynamo captured, and returns a callable.

`captured.py` reads the graph, `rewrites.py` rewrites it, and `compiled_graph.py` runs the result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from specache_compile.errors import SpecacheError
from specache_compile.lowering.lower import lower
from specache_compile.lowering.progress import compiling
from specache_compile.methods import METHODS, parse_options
from specache_compile.passes.reading.find_attention import WINDOW
from specache_compile.passes.reading.local_shards import own_part
from specache_compile.passes.reading.nodes import hint
from specache_compile.passes.reading.sites import LeftAlone
from specache_compile.runtime.held import HeldTensor
from specache_compile.runtime.ranks import ranks_of
from specache_compile.runtime.records import ModelRecord, parameters_in, record_of
from specache_compile.runtime.rewritten import phases, variant_of
from specache_compile.runtime.state import bucket, predicted_bytes
from specache_compile.runtime.step import padding_in_front
from specache_compile.runtime.tiers import effective_options

from .captured import Captured, capture, unread_held
from .compiled_graph import CompiledGraph
from .free_sizes import free_sizes
from .rewrites import Rewrites

log = logging.getLogger(__name__)


def specache(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph that Dynamo captured. Registered as the backend "specache"; docs/options.md lists `options`."""
    try:
        return compile_graph(capture(graph_module, parse_options(options), mode), example_inputs)
    except SpecacheError as error:
        return refusal(error)


def refusal(error: SpecacheError) -> Callable[..., Any]:
    """A callable that raises an error instead of a refused graph. Dynamo would wrap an error that is raised while it
    compiles."""
    kind, arguments_of_error = type(error), error.args  # without the traceback, which holds the graph

    def refuse(*arguments: Any) -> NoReturn:
        raise kind(*arguments_of_error)

    return refuse


def compile_graph(captured: Captured, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A callable for one captured graph: rewritten if it has sites, else as Hugging Face wrote it."""
    if captured.is_recognised:
        free_sizes(captured.placeholders, captured.fakes, example_inputs)
    report_left_alone(record_of(parameters_in(example_inputs)), captured.left_alone, len(captured.sites))
    if captured.sites:
        return compile_sites(captured, example_inputs)
    unread, why = unread_held(captured), reasons(captured.left_alone)

    def taken(arguments: Sequence[Any]) -> list[Any]:
        """The arguments, with plain tensors for held ones."""
        given = map(own_part, arguments, captured.fakes)
        return [made_plain(value, why, i in unread) for i, value in enumerate(given)]

    options, examples = captured.options, [*example_inputs]
    for i in captured.held:
        anchor, shape = captured.fakes[i].anchor, captured.fakes[i].shape
        examples[i] = anchor.expand(shape) if i in unread else anchor.new_empty(shape)
        captured.placeholders[i].meta["example_value"] = examples[i]
    with compiling("a graph that stays exact", options.lowering):
        lowered = lower(captured.graph_module, taken(examples), options.lowering, {}, captured.mode)
    as_they_are = not captured.held and not any(isinstance(value, DTensor) for value in example_inputs)

    def run_exact(*arguments: Any) -> Any:
        record = record_of(parameters_in(arguments))
        record.calls += 1
        record.absorbed = max(record.absorbed, len(captured.absorbed))
        record.exact = why or record.exact
        return lowered(*(arguments if as_they_are else taken(arguments)))

    return run_exact


def made_plain(value: Any, why: str, unread: bool) -> Any:
    """The plain keys or values that a graph which could not be rewritten reads instead of held ones.

    why: the reason. unread: it reads the shape alone, for which no memory is needed.
    """
    if not isinstance(value, HeldTensor):
        return value
    if unread:
        return value.anchor.expand(value.shape)
    return value if value.handle is None else value.handle.session.to_plain(value.handle, why)


def compile_sites(captured: Captured, example_inputs: Sequence[Any]) -> CompiledGraph:
    """Lower the graph while Dynamo traces, for the state that the first call will have."""
    rewrites = Rewrites(captured)
    past, tokens = map(hint, (captured.past, captured.tokens))
    # Raises for head sizes that the options do not support, even if the first call is too short to be compressed.
    predicted_bytes(captured.options, captured.layers, 1, past + tokens)
    given, ranks = captured.options.for_prompt(past or tokens), ranks_of(example_inputs)
    options = effective_options(given, captured.layers, hint(captured.batch), past + tokens, ranks)
    front = front_of(captured, example_inputs, past, tokens)
    for phase in phases(captured.phase, options):
        variant = variant_of(captured, phase, options, front, example_inputs, bucket(past + tokens))
        rewrites.get(variant, ahead=True)
    return CompiledGraph(captured, rewrites)


def front_of(captured: Captured, example_inputs: Sequence[Any], past: int, tokens: int) -> tuple[int, ...] | None:
    """The padding in front of rows that a step will find in its first call (`Step.update_padding`)."""
    if captured.padding is None or not (captured.is_causal and METHODS[captured.options.method].rows_differ):
        return None
    padding = example_inputs[captured.padding]
    handle = example_inputs[captured.held[0]].handle if captured.held else None
    lengths = (0,) * padding.shape[0] if handle is None else handle.session.progress.lengths
    return padding_in_front(padding, lengths, past, tokens) if len(lengths) == padding.shape[0] else None


def report_left_alone(record: ModelRecord, left_alone: Sequence[LeftAlone], rewritten: int) -> None:
    """Warn of attentions that stay exact, once for a model and its reasons; only log those that stay exact by design.

    These are the attentions of `exact_layers`, and sliding windows beside attentions that are rewritten.
    """
    text = f"specache rewrote {rewritten} attentions of a graph and left {len(left_alone)} exact: {reasons(left_alone)}"
    kinds = {item.reason for item in left_alone}
    if all(kind.startswith("option exact_layers") or (rewritten and kind == WINDOW) for kind in kinds):
        log.info("%s", text) if kinds else None
    else:
        record.warn_once(text, "; ".join(sorted(kinds)))


def reasons(left_alone: Sequence[LeftAlone]) -> str:
    """Each reason once, with the number of its attentions and the first one's name."""
    nodes: dict[str, list[str]] = {}
    for item in left_alone:
        nodes.setdefault(item.reason, []).append(item.node)
    return "; ".join(f"{len(names)} ({names[0]}, ...): {reason}" for reason, names in nodes.items())
