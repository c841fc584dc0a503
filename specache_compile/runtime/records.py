"""Records of each compiled model: its graphs, its last generation and its warnings."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from specache_compile.errors import warn
from specache_compile.model_key import calling_model, decoder_of
from specache_compile.passes.phase import PHASES, Phase


@dataclass
class Statistics:
    """Counts of one session, which outlive the session.

    device: of the session, whose copies the counts include.
    fetched, corrected: the session's tensors of bytes prefetched and corrected.
    steps: by phase.
    replays: steps that replayed recorded ones.
    python_seconds: the part of `seconds` outside of lowered graphs.
    rounds, drafted, accepted: verifications, and their tokens. A round may have an empty draft.
    """

    device: torch.device
    fetched: list[Tensor] = field(default_factory=list)
    corrected: list[Tensor] = field(default_factory=list)
    pair_bytes: list[int] = field(default_factory=list)
    bytes_to_host: int = 0
    steps: dict[str, int] = field(default_factory=lambda: dict.fromkeys((phase.name for phase in PHASES), 0))
    seconds: float = 0.0
    python_seconds: float = 0.0
    bytes_by_tier: dict[str, int] = field(default_factory=dict)
    full_cache_bytes: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    replays: int = 0
    ranks: int = 1

    def count(self, ran: Sequence[Phase], total: float, inside: float) -> None:
        """Count one step that ran these phases in `total` seconds, `inside` of them in lowered graphs."""
        for phase in ran:
            self.steps[phase.name] += 1
        self.seconds += total
        self.python_seconds += total - inside


@dataclass
class ModelRecord:
    """The captured graphs of one model, and its newest generation.

    graphs: of `compile/compiled_graph.py: CompiledGraph`, with the options of the newest one.
    latest: the statistics of its session; None if no rewritten graph has run.
    calls: graphs of this backend that ran, rewritten or not.
    unused: why no graph ran, if `generate` has found a reason.
    absorbed: latent attentions that read Hugging Face's own cache, in a graph without held layers.
    exact: the reason why the newest exact graph has no rewritten attention.
    warned: keys of the warnings about this model so far.
    """

    graphs: list[Any] = field(default_factory=list)
    latest: Statistics | None = None
    calls: int = 0
    unused: str | None = None
    absorbed: int = 0
    exact: str = ""
    warned: set[str] = field(default_factory=set)

    def warn_once(self, message: str, key: str = "") -> None:
        """Warn at the user's line, once for each key; without a key, once for each message."""
        if (key or message) not in self.warned:
            self.warned.add(key or message)
            warn(message)

    def note(self, graph: Any, statistics: Statistics) -> None:
        if graph not in self.graphs:
            alike = [other for other in self.graphs if other.captured.options == graph.captured.options]
            self.graphs = [*alike, graph]
        self.calls += 1
        self.latest = statistics


# Keyed by the parameters of a model, which both the model and a captured graph's arguments contain, and by its decoder.
_records: WeakIdKeyDictionary = WeakIdKeyDictionary()
# The record of the graph that this thread ran last.
_newest = threading.local()


def parameters_in(arguments: Sequence[Any]) -> list[torch.nn.Parameter]:
    """The model's parameters among a graph's arguments."""
    return [argument for argument in arguments if isinstance(argument, torch.nn.Parameter)]


def keys_of(model: torch.nn.Module) -> Iterator[Any]:
    """Yield what the record of a model is found by."""
    yield from model.parameters()
    yield decoder_of(model)


def record_of(parameters: Sequence[torch.Tensor]) -> ModelRecord:
    """The record of the model with these parameters, or of the model that is running; a new one if there is none.

    Dynamo uses one graph for every model of one class and shape, so each call may belong to another model. A graph
    between graph breaks may have no parameters, and accelerate loads offloaded layers as new parameters in each call.
    Without a running model, a graph without parameters belongs to the model whose graphs this thread ran last.
    """
    known = next((_records[parameter] for parameter in parameters if parameter in _records), None)
    model = None if known else calling_model()
    if model is not None:
        known = _records.get(decoder_of(model))
    elif not known and not parameters:
        known = getattr(_newest, "record", lambda: None)()
    if known is None:
        known = ModelRecord()
        for key in [*parameters, *(() if model is None else keys_of(model))]:
            _records[key] = known
    _newest.record = weakref.ref(known)
    return known


def find_record(model: torch.nn.Module) -> ModelRecord | None:
    """The record of a compiled model; None if it has not run yet."""
    return next((_records[key] for key in keys_of(model) if key in _records), None)


def forget(model: torch.nn.Module) -> None:
    """Drop the record of a model with its compiled graphs, before it is compiled with other options."""
    for key in keys_of(model):
        _records.pop(key, None)
