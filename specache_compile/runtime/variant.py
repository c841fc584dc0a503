"""The variants in which a captured graph is rewritten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from specache_compile.options import MethodOptions
from specache_compile.passes.phase import Phase


@dataclass(frozen=True)
class Variant:
    """A phase with a session's options.

    unpadded: of a graph with a padding mask, the variant for a mask that equals the rows' lengths.
    ragged: of a prefill, the variant for padding in front of rows, which is not stored.
    capacity: tokens of the state, if a graph serves one capacity only; None: any.
    """

    phase: Phase
    options: MethodOptions
    unpadded: bool = False
    ragged: bool = False
    capacity: int | None = None


def variant_of(
    graph: Any, phase: Phase, options: MethodOptions, front: Sequence[int] | None, arguments: Sequence[Any],
    capacity: int,
) -> Variant:  # fmt: skip
    """The variant for a call.

    graph: its `compile/captured.py: Captured`.
    front: padding in front of each row's new tokens; None: no mask, or one that hides anything else.
    capacity: tokens that the state has room for.
    """
    is_prefill = not graph.phase.has_past
    ragged = is_prefill and front is not None and any(front)
    unpadded = front is not None and not ragged
    if is_prefill and front is None and graph.padding is not None:
        # transformers before 5.18 passes a mask of ones to every prefill. Here the host waits for the device.
        mask = arguments[graph.padding]
        unpadded = isinstance(mask, FakeTensor) or bool(mask.all())
    return Variant(phase, options, unpadded, ragged, None if options.capacity_is_free else capacity)


def selects(options: MethodOptions) -> bool:
    """Whether a decode step selects pairs for the next step; not if each token selects its own and none is
    speculative."""
    return options.top_k > 0 and (options.two_lanes or not options.corrects)


def phases(phase: Phase, options: MethodOptions) -> tuple[Phase, ...]:
    """The phases that a graph captured in this phase is rewritten for."""
    return (phase.before, phase) if phase.before is not None and selects(options) else (phase,)
