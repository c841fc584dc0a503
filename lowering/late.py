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
    """As above, after Dynamo has finished, when nothing checks the assumptions (see `guards`). The fake-tensor cache is
    off: on a cache hit torch adds guards of its own."""
    with disable_fake_tensor_cache(fake_mode):
        return made_within_tracing(fake_mode, make)


def guards(fake_mode: FakeTensorMode) -> tuple[sympy.Basic, ...]:
    """The statements about symbolic sizes that hold at the sizes of Dynamo's trace. Dynamo checks those that were made
    before it finished.

    The others come from torch, which asks of a sliding layer's strides whether its tensors are contiguous, and from
    Inductor's caches: a graph assumes what it assumed in the process that stored it. The list is shared by all graphs
    of one trace: a guard that one graph added is not added again for the next.
    """
    return () if fake_mode.shape_env is None else tuple(guard.expr for guard in fake_mode.shape_env.guards)
