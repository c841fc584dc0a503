"""Graphs that are made after Dynamo has written its guards.

A running generation comes to them: of the options that it has with `min_context` tokens, of the phase that checks its
first drafts, and, of a method whose shapes depend on a budget, of the next capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import sympy
from torch._dynamo import convert_frame
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode, disable_fake_tensor_cache

Made = TypeVar("Made")
# Dynamo's own: a fake mode is on one thread at a time, and with a lock beside it two threads would wait for each other.
compile_lock = convert_frame.compile_lock


def made_within_tracing(fake_mode: FakeTensorMode, make: Callable[[], Made]) -> Made:
    """What `make` traces and lowers under the fake mode of Dynamo's fakes, outside any other compilation of Dynamo's.

    While Dynamo compiles, it guards what is assumed of symbolic sizes.
    """
    with tracing(TracingContext(fake_mode)):
        return make()


def made_late(fake_mode: FakeTensorMode, make: Callable[[], Made]) -> Made:
    """The same when Dynamo has gone, and nobody guards: see `guards`. Results are not remembered: of those that
    are, torch asks more."""
    with disable_fake_tensor_cache(fake_mode):
        return made_within_tracing(fake_mode, make)


def guards(fake_mode: FakeTensorMode) -> tuple[sympy.Basic, ...]:
    """What is assumed of symbolic sizes so far, at those of Dynamo's trace; what came after it, Dynamo does not check.

    Torch asks whether tensors lie close, of the strides of a layer that slides; and a graph out of Inductor's caches
    assumes whatever it did in the process that stored it. They are of all graphs together: what one has asked, torch
    remembers, and does not ask for the next.
    """
    return () if fake_mode.shape_env is None else tuple(guard.expr for guard in fake_mode.shape_env.guards)
