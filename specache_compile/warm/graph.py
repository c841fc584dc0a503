"""A compiled graph without the graph: what a call needs of what Dynamo captured, and its rewritten forms, as data."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from specache_compile.compile.backend import left_alone_text
from specache_compile.compile.captured import Captured
from specache_compile.compile.compiled_graph import CompiledGraph
from specache_compile.compile.rewritten import one_lane
from specache_compile.lowering.kept import NotKeepable, data_of, lowered_from
from specache_compile.methods import METHODS
from specache_compile.methods.field import LayerShape
from specache_compile.options import MethodOptions
from specache_compile.passes.phase import Phase
from specache_compile.passes.reading.sites import LeftAlone
from specache_compile.rope_switch import RopeSwitch
from specache_compile.runtime.held import HeldTensor
from specache_compile.runtime.rewritten import Rewritten
from specache_compile.runtime.symbols import SymbolReader, as_traced
from specache_compile.runtime.variant import Variant

from . import store
from .code import hash_of
from .collecting import no_collecting
from .instructions import found_to_work, trust


class NotKept(Exception):
    """A call needs a form of a graph that no process has kept."""


# Inductor's settings that no text tells apart.
OWN_PASSES = (
    "pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass", "_pre_fusion_custom_pass", "_post_fusion_custom_pass",
)  # fmt: skip


@dataclass(frozen=True)
class Recalled:
    """What `compile/captured.py: Captured` says of a graph to those who call it, without the graph.

    batch, tokens: numbers, or expressions of what `symbols` reads.
    """

    options: MethodOptions
    mode: str | None
    phase: Phase
    layers: list[LayerShape]
    batch: Any
    tokens: Any
    padding: int | None
    pasts: tuple[tuple[int, int], ...]
    frequencies: tuple[int | None, ...]
    is_causal: bool
    names: tuple[str, ...]
    symbols: SymbolReader
    left_alone: tuple[LeftAlone, ...]
    rope_switch: RopeSwitch | None

    def unpadded(self, arguments: Sequence[Any]) -> bool:
        return not (self.phase.has_past or self.padding is None) and bool(arguments[self.padding].all())


def recalled(captured: Captured) -> Recalled:
    """NotKeepable where what runs is not on a CPU alone, has weights of a class of their own, or a method of others."""
    if not is_own(captured.options):
        raise NotKeepable(f"method {captured.options.method!r} of another package, whose source is in no key")
    for fake in captured.fakes:
        if isinstance(fake, Tensor) and fake.device.type != "cpu":
            raise NotKeepable(f"an input on {fake.device}")
        if isinstance(fake, Tensor) and not is_plain(fake):
            raise NotKeepable(f"an input of class {type(fake).__name__}")
    return Recalled(
        captured.options, captured.mode, captured.phase, captured.layers, as_traced(captured.batch),
        as_traced(captured.tokens), captured.padding, captured.pasts, captured.frequencies, captured.is_causal,
        captured.names, captured.symbols, captured.left_alone, captured.rope_switch,
    )  # fmt: skip


def is_own(options: MethodOptions) -> bool:
    """Whether this package declares the method."""
    return METHODS[options.method].recipe.__module__.startswith("specache_compile.")


def is_plain(fake: Tensor) -> bool:
    """Whether a tensor is one of torch's own classes, or a held one: those of others have data inside."""
    return isinstance(fake, HeldTensor) or type(fake) in (FakeTensor, torch.nn.Parameter)


class Recall:
    """A graph's forms, from its folder when they are needed; in place of `compile/rewritten.py: Rewrites`."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.root = folder, root
        self.name = folder.name
        self.made: dict[Variant, Rewritten] = {}

    def form(self, variant: Variant, arguments: Sequence[Any]) -> Rewritten:
        """The graph rewritten for `variant`; NotKept where no process has kept it."""
        if variant not in self.made:
            data = store.read(self.folder / variant_name(variant), self.root)
            if data is None:
                raise NotKept(f"{variant.phase} of {self.name}")
            self.made[variant] = form = self.loaded(variant, data)
            if form.one_lane is not None:
                store.tell_once(one_lane(form.one_lane))
        return self.made[variant]

    def loaded(self, variant: Variant, data: bytes) -> Rewritten:
        try:
            with no_collecting():
                folder, form = rewritten_from(data)
        except Exception as error:  # whatever a damaged file raises when it is unpickled
            store.tell_once(f"{self.folder} is of no use ({type(error).__name__}: {error}): the model is traced")
            raise NotKept(f"{variant.phase} of {self.name}") from error
        if folder != self.folder.name or form.variant != variant:
            raise NotKept(f"{variant.phase} of {self.name}")
        return form


def variant_name(variant: Variant) -> str:
    """A file's name. The options are compared by their text: a hash of theirs is another in every process."""
    return f"{variant.phase}-{hash_of(variant)}"


def data_of_form(folder: Path, form: Rewritten) -> bytes:
    """NotKeepable where it holds only for sizes that it checks itself, or cannot be data."""
    if form.assumes:
        raise NotKeepable("a form that holds for some sizes only")
    if form.capture:
        raise NotKeepable("a step that is to be recorded into a CUDA graph")
    facts = (
        form.variant, form.inputs, dict(form.held_outputs), form.guesses, form.lanes, form.one_lane,
        form.counts_positions,
    )  # fmt: skip
    return pickle.dumps((folder.name, facts, found_to_work(), data_of(form.run)))


def rewritten_from(data: bytes) -> tuple[str, Rewritten]:
    """A form, and the name of the folder that it was kept in. It has no graph, and no trace of the passes."""
    name, facts, instructions, lowered = pickle.loads(data)
    variant, inputs, held_outputs, guesses, lanes, one_lane, counts = facts
    trust(instructions)
    run = lowered_from(lowered)
    return name, Rewritten(
        variant, run, None, inputs, held_outputs, guesses, lanes, False, None, one_lane, counts,  # type: ignore[arg-type]
    )  # fmt: skip


def keep_form(folder: Path, form: Rewritten) -> bool:
    return store.write(folder / variant_name(form.variant), data_of_form(folder, form))


def graph_from(facts: Recalled, folder: Path, root: Path) -> CompiledGraph:
    """The graph that these facts are of, with the warnings that it was compiled with."""
    if facts.left_alone:
        store.tell_once(left_alone_text(facts.left_alone, len(facts.layers)))
    return CompiledGraph(facts, Recall(folder, root))  # type: ignore[arg-type]


def is_wanted() -> bool:
    """Whether forms may be taken from the store, or kept: not where somebody is to look at graphs, has Inductor run
    passes of their own, or wants no caches."""
    inductor = torch._inductor.config
    own = any(getattr(inductor, name, None) for name in OWN_PASSES)
    return not (os.environ.get("SPECACHE_DUMP") or own or inductor.force_disable_caches)
