"""Build graphs after Dynamo has generated its guards.

A running generation needs such graphs at `min_context` tokens, to verify its first drafts, and for the next capacity
of a method whose shapes depend on a budget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import sympy
from torch._dynamo import convert_frame
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode, disable_fake_tensor_cache

Made = TypeVar("Made")
# Dynamo's lock: only one thread may use a fake mode, and a second lock could deadlock with this one.
compile_lock = convert_frame.compile_lock


def made_within_tracing(fake_mode: FakeTensorMode, make: Callable[[], Made]) -> Made:
    """Return the result of `make`, which traces and lowers in Dynamo's fake mode with a separate tracing context.

    While Dynamo compiles, it guards assumptions about symbolic sizes.
    """
    with tracing(TracingContext(fake_mode)):
        return make()


def made_late(fake_mode: FakeTensorMode, make: Callable[[], Made]) -> Made:
    """Do the same as `made_within_tracing` after Dynamo has finished, when nothing checks assumptions (see `guards`).

    The fake-tensor cache is off, since torch adds guards on each cache hit.
    """
    with disable_fake_tensor_cache(fake_mode):
        return made_within_tracing(fake_mode, make)


def guards(fake_mode: FakeTensorMode) -> tuple[sympy.Basic, ...]:
    """Return the assumptions about symbolic sizes. Dynamo checks those that were made before it finished.

    Others come from torch, which tests strides of sliding layers for contiguity. Inductor's caches add more: a graph
    keeps the assumptions of the process that stored it. All graphs of one trace share the list, which holds each
    guard once.
    """
    return () if fake_mode.shape_env is None else tuple(guard.expr for guard in fake_mode.shape_env.guards)
