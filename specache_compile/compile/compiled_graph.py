"""The callable that Dynamo runs for a captured graph: finds the session, opens a step, runs the rewritten graphs."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from specache_compile.errors import SpecacheError
from specache_compile.lowering import cuda_graphs
from specache_compile.model_key import calling_model, prefill_key
from specache_compile.options import differences
from specache_compile.passes.reading.local_shards import local
from specache_compile.runtime.ranks import check_same, ranks_of
from specache_compile.runtime.records import record_of
from specache_compile.runtime.session import Session, agreed_session
from specache_compile.runtime.step import opened

from .captured import Captured
from .rewrites import Rewrites, Rewritten


class CompiledGraph:
    """The callable that Dynamo runs for a captured graph. It returns the graph's outputs, with held tensors for the
    cache.

    weights: positions of the model's parameters among the arguments; known from the first call on.
    uncaptured: variants whose steps are no longer captured, because an input has a new address in every step.
    """

    def __init__(self, captured: Captured, rewrites: Rewrites) -> None:
        self.captured, self.rewrites = captured, rewrites
        self.weights: list[int] | None = None
        self.uncaptured: set[Rewritten] = set()

    def __call__(self, *arguments: Any) -> list[Any]:
        start, weights = time.perf_counter(), self.weights_of(arguments)
        record, session = record_of(weights), self.session_for(arguments, weights)
        padding = None if self.captured.padding is None else arguments[self.captured.padding]
        tokens = self.captured.symbols.value(self.captured.tokens, arguments)
        with opened(session, tokens, padding, self.captured.is_causal) as step:
            outputs = step.run(self, arguments)
        session.statistics.count(step.ran, time.perf_counter() - start, step.inside)
        record.note(self, session.statistics)
        return outputs

    def weights_of(self, arguments: Sequence[Any]) -> list[torch.nn.Parameter]:
        """The model's parameters among the arguments. Dynamo's guards check the class of each argument."""
        if self.weights is None:
            self.weights = [i for i, value in enumerate(arguments) if isinstance(value, torch.nn.Parameter)]
        return [arguments[i] for i in self.weights]

    def session_for(self, arguments: Sequence[Any], weights: Sequence[torch.nn.Parameter]) -> Session:
        """The session of the held arguments, brought to their view; a new one in a prefill."""
        captured = self.captured
        if not captured.phase.has_past:
            batch, tokens = (captured.symbols.value(size, arguments) for size in (captured.batch, captured.tokens))
            ranks = ranks_of(arguments)
            check_same(ranks, captured.options, {"batch": batch, "tokens": tokens})
            session = Session(captured.options, captured.layers, batch, tokens, ranks)
            session.rope_switch = captured.rope_switch
            session.weights = list(map(weakref.ref, weights))
            session.progress.keys = (prefill_key(calling_model(), weights),) * batch
        else:
            handles = [(site, arguments[i].handle) for site, past in enumerate(captured.pasts) for i in past]
            session = agreed_session(handles)
            self.check_layers(session)
            if session.requested != captured.options and (found := differences(session.requested, captured.options)):
                session.warn_once(
                    f"this cache was made with other options than the model's, and keeps its own: {found}. Prefill "
                    "again to use the model's options, or compile the model with the cache's"
                )
        if session.tiers.pending is not None:
            known = session.tiers.frequencies
            session.tiers.frequencies = [
                before if i is None else local(arguments[i])
                for before, i in zip(known, captured.frequencies, strict=True)
            ]
        return session

    def check_layers(self, session: Session) -> None:
        """SpecacheError if the layers of a cache from elsewhere, or of another model, differ from this graph's."""
        ours, graphs = session.layers, self.captured.layers
        if len(ours) != len(graphs):
            raise other_shapes(f"{len(ours)} layers", str(len(graphs)))
        centers = getattr(session.options, "center", "never") == "auto"
        for layer, expected in zip(ours, graphs, strict=True):
            if layer != expected and (centers or layer != replace(expected, biased_keys=layer.biased_keys)):
                raise other_shapes(f"{layer} in layer {layer.number}", str(expected))

    def stop_capturing(self, rewritten: Rewritten, position: int) -> None:
        """Run a variant's steps uncaptured from here on, since the input at `position` has a new address in
        every step."""
        self.uncaptured.add(rewritten)
        source = rewritten.inputs[position]
        name = self.captured.names[source.argument] if source.source == "argument" else source.source
        record_of(()).warn_once(
            f"mode={self.captured.mode!r}: the decode step now runs without a CUDA graph: input {name} has a new "
            "address in every step. Pass the same tensor each time, or one of at most "
            f"{cuda_graphs.COPIED_BYTES >> 20} MiB, which is copied"
        )


def other_shapes(cache: str, model: str) -> SpecacheError:
    return SpecacheError(
        f"this cache belongs to another model: the cache has {cache}, this model has {model}. Pass each model the "
        "cache that it filled itself. If this one did, remove the model's graph breaks (TORCH_LOGS=graph_breaks)"
    )
