"""Graphs that are made after Dynamo has written its guards.

A running generation needs them for the options from `min_context` tokens on, for the phase that verifies its first
drafts, and, with a method whose shapes depend on a budget, for the next capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import sympy
from torch._dynamo import convert_frame
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode, disable_fake_tensor_cache

Made = TypeVar("Made")
# Dynamo's own lock: only one thread may use a fake mode, and with a second lock two threads could wait for each other.
compile_lock = convert_frame.compile_lock


def made_within_tracing(fake_mode: FakeTensorMode, make: Callable[[], Made]) -> Made:
    """The result of `make`, which traces and lowers under the mode of Dynamo's fakes, outside Dynamo's other
    compilations.

    While Dynamo compiles, it guards the assumptions about symbolic sizes.
    """
    with tracing(TracingContext(fake_mode)):
        return make()


def made_late(fake_mode: FakeTensorMode, make: Callable[[], Made]) -> Made:
    """As `made_within_tracing`, after Dynamo has finished, when nothing checks the assumptions (see `guards`). The
    fake-tensor cache is off: on a cache hit torch adds guards of its own."""
    with disable_fake_tensor_cache(fake_mode):
        return made_within_tracing(fake_mode, make)


def guards(fake_mode: FakeTensorMode) -> tuple[sympy.Basic, ...]:
    """The assumed statements about symbolic sizes. Dynamo checks those that were made before it finished.

    The others come from torch, which asks by a sliding layer's strides whether its tensors are contiguous, and from
    Inductor's caches: a graph keeps the assumptions of the process that stored it. The list is shared by all graphs of
    one trace: a guard that one graph added is not added again for the next.
    """
    return () if fake_mode.shape_env is None else tuple(guard.expr for guard in fake_mode.shape_env.guards)
