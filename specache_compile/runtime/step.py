"""One call of a captured graph: find the session, begin the step, run the rewritten graph, finish the step."""

from __future__ import annotations

import functools
import time
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from specache_compile.errors import (
    SpecacheWarning,
    copy_failed,
    other_center,
    other_shapes,
    other_sizes,
    plain_already,
)
from specache_compile.lowering import cuda_graphs
from specache_compile.options import MethodOptions, own_options
from specache_compile.passes.phase import Phase

from .held import HeldTensor
from .ranks import check_same, ranks_of
from .records import record_of
from .regroup import agreed_session
from .session import Session

if TYPE_CHECKING:
    from transformers import DynamicCache

    from specache_compile.compile.captured import Captured  # noqa: TID251  (types alone)
    from specache_compile.compile.rewritten import Rewrites, Rewritten  # noqa: TID251


class CompiledGraph:
    """What Dynamo calls in place of a captured graph: takes its arguments; returns what it would, held tensors in
    place of the cache."""

    def __init__(self, captured: Captured, rewrites: Rewrites) -> None:
        self.captured, self.rewrites = captured, rewrites
        # Graphs whose steps are no longer captured, since an input of theirs moves in every one.
        self.uncaptured: set[Rewritten] = set()
        # Sessions whose layers are known to be shaped as this graph's.
        self.fitting: weakref.WeakSet[Session] = weakref.WeakSet()

    @property
    def phase(self) -> str:
        return self.captured.phase.name

    def __call__(self, *arguments: Any) -> list[Any]:
        start = time.perf_counter()
        session = self.session_for(arguments)
        try:
            phase, outputs, inside = self.step(session, arguments)
        except BaseException as error:
            session.abandon_step()
            if session.queue.error is not None and isinstance(error, Exception):
                raise copy_failed(session.queue.error) from error
            raise
        session.statistics.count(phase, time.perf_counter() - start, inside)
        return outputs

    def session_for(self, arguments: Sequence[Any]) -> Session:
        """The session behind the held arguments, brought to the view that they are; a new one in a prefill."""
        captured = self.captured
        if not captured.phase.has_past:
            batch, tokens = (captured.symbols.value(size, arguments) for size in (captured.batch, captured.tokens))
            ranks = ranks_of(arguments)
            check_same(ranks, captured.options, {"batch": batch, "tokens": tokens})
            session = Session(captured.options, captured.layers, batch, tokens, ranks)
            session.weights = [weakref.ref(value) for value in arguments if isinstance(value, torch.nn.Parameter)]
        else:
            handles = [(site, arguments[i].handle) for site, past in enumerate(captured.pasts) for i in past]
            session = agreed_session(handles, [x for x in arguments if isinstance(x, torch.nn.Parameter)])
            self.check_layers(session)
            if session.asked != captured.options and not session.told_of_options:
                session.told_of_options = warn_of_other_options(session.asked, captured.options)
        record_of(arguments).note(self, session.statistics)
        return session

    def check_layers(self, session: Session) -> None:
        """SpecacheError where a cache that came from elsewhere, or another model, has other layers than this graph."""
        if session in self.fitting:
            return
        ours, graphs = session.layers, self.captured.layers
        if len(ours) != len(graphs):
            raise other_shapes(f"{len(ours)} layers", str(len(graphs)))
        centers = getattr(session.options, "center", "never") == "auto"
        for layer, wanted in zip(ours, graphs, strict=True):
            if layer != replace(wanted, biased_keys=layer.biased_keys):
                raise other_shapes(f"{layer} in layer {layer.number}", str(wanted))
            if centers and layer != wanted:
                raise other_center(layer.biased_keys)
        self.fitting.add(session)

    def step(self, session: Session, arguments: Sequence[Any]) -> tuple[str, list[Any], float]:
        """Run this graph's phase, after a pre-decode where the slots were not chosen for this step.

        Returns the phase's name, the outputs, and the seconds spent inside the lowered graphs.
        """
        captured = self.captured
        tokens = captured.symbols.value(captured.tokens, arguments)
        session.begin(tokens, None if captured.padding is None else arguments[captured.padding])
        *before, phase = session.phases(captured.phase, captured.is_causal)
        if phase.over_tiers and session.options.top_k and not (before or session.slots_ready):
            session.queue.wait_for_offloads()  # what the step itself will fetch may still be on its way to the host
        rewritten = self.form(session, phase, arguments)
        guess_is_missing = session.guess is None and rewritten.needs_guess
        choosing = before if guess_is_missing or not session.slots_ready else ()
        choosers = [self.form(session, earlier, arguments) for earlier in choosing]
        session.start_evicting()  # only here, where all that runs is had and checked
        inside = 0.0
        for chooser in choosers:
            _, inside = self.run(session, chooser, arguments)
            session.statistics.steps[chooser.variant.phase.name] += 1
        outputs, seconds = self.run(session, rewritten, arguments)
        session.finish(tokens, phase)
        for position, (site, part) in rewritten.held_outputs.items():
            outputs[position] = session.held(site, part)
        return phase.name, outputs, inside + seconds

    def form(self, session: Session, phase: Phase, arguments: Sequence[Any]) -> Rewritten:
        """The graph rewritten for a phase of this session; SpecacheError where this call's sizes are not what it
        assumes."""
        rewritten = self.rewrites.get(session.variant(phase, self.captured.unpadded(arguments)))
        for assumed in rewritten.assumes:
            if not self.captured.symbols.holds(assumed, arguments):
                raise other_sizes(assumed)
        return rewritten

    def run(self, session: Session, rewritten: Rewritten, arguments: Sequence[Any]) -> tuple[list[Any], float]:
        """Run one rewritten graph on the session's state, and keep its guess; returns the outputs, and seconds."""
        inputs = session.bind(rewritten.inputs, arguments)
        start = time.perf_counter()
        captures = rewritten.capture and rewritten not in self.uncaptured
        if captures and not session.capturable:
            session.told_uncaptured = session.told_uncaptured or self.warn_of_pageable()
        if captures and session.capturable:
            stays = [source.source in ("state", "cursor", "padding") for source in rewritten.inputs]
            give_up = functools.partial(self.stop_capturing, rewritten)
            device = session.cursor.device
            outputs = session.recorded.run(rewritten.run, inputs, stays, device, give_up, session.deferred)
            session.statistics.replays = session.recorded.replays
        else:
            session.deferred.make()
            outputs = list(rewritten.run(*inputs))
        seconds = time.perf_counter() - start
        session.guess = outputs.pop() if rewritten.guesses else None
        return outputs, seconds

    def warn_of_pageable(self) -> bool:
        """Say that a session's steps are not captured, since the GPU cannot read its host tier; returns True."""
        warnings.warn(
            f"mode={self.captured.mode!r}: no CUDA graph of the decode step: the host tier could not be pinned, so "
            "that the host makes its copies. Raise the limit on locked memory (ulimit -l), or lower the batch or the "
            "context",
            SpecacheWarning,
            stacklevel=2,
        )
        return True

    def stop_capturing(self, rewritten: Rewritten, position: int) -> None:
        """From here on a graph's steps run as they are, since the input at `position` moves in every one."""
        self.uncaptured.add(rewritten)
        source = rewritten.inputs[position]
        placeholders = self.captured.placeholders
        name = placeholders[source.argument].name if source.source == "argument" else source.source
        warnings.warn(
            f"mode={self.captured.mode!r}: no CUDA graph of the decode step any more: input {name}, which is read "
            "where it lies, lies elsewhere in every step. Pass the same tensor each time, or one of at most "
            f"{cuda_graphs.COPIED_BYTES >> 20} MiB, which is copied",
            SpecacheWarning,
            stacklevel=2,
        )


def differences(made_under: MethodOptions, compiled_with: MethodOptions) -> str:
    """The options of a cache that a model has otherwise; empty where there are none. How a model is lowered is its own,
    whichever cache comes to it."""
    special = (name for name in own_options(type(made_under)) if name not in own_options(MethodOptions))
    names = ["method", "exact_layers", *special]
    return ", ".join(
        f"{name} {getattr(made_under, name)!r} (the model's: {getattr(compiled_with, name)!r})"
        for name in names
        if hasattr(compiled_with, name) and getattr(made_under, name) != getattr(compiled_with, name)
    )


def warn_of_other_options(made_under: MethodOptions, compiled_with: MethodOptions) -> bool:
    """A cache goes on as it was made, whichever compiled model it comes to: its tiers hold nothing else. Returns
    whether there was something to say."""
    told = differences(made_under, compiled_with)
    if told:
        warnings.warn(
            f"this cache was made with other options than the model is compiled with, and goes on with its own: {told}",
            SpecacheWarning,
            stacklevel=2,
        )
    return bool(told)


def session_behind(cache: DynamicCache) -> Session:
    """The session of a held cache, brought to the view that the cache is; SpecacheError where it is plain."""
    layers: list[Any] = list(cache.layers)
    held = [layer for layer in layers if isinstance(getattr(layer, "keys", None), HeldTensor)]
    if not held:
        raise plain_already()
    return agreed_session(
        [(site, part.handle) for site, layer in enumerate(held) for part in (layer.keys, layer.values)]
    )
