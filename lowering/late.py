"""Graphs that are made after Dynamo has written its guards: a bucket that a running generation has grown into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import sympy
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

Made = TypeVar("Made")


def made_within_tracing(fake_mode: FakeTensorMode, make: Callable[[], Made]) -> Made:
    """What `make` traces and lowers under the fake mode of Dynamo's fakes, while Dynamo compiles: it guards what is
    assumed of symbolic sizes."""
    with tracing(TracingContext(fake_mode)):
        return make()


def made_late(fake_mode: FakeTensorMode, make: Callable[[], Made]) -> tuple[Made, tuple[sympy.Basic, ...]]:
    """The same when Dynamo has gone; and what is assumed beyond its guards, which nobody but the caller will check.

    Torch asks whether tensors lie close, of the strides of a layer that slides; and a graph out of Inductor's caches
    assumes whatever it did in the process that stored it.
    """
    if fake_mode.shape_env is None:
        return made_within_tracing(fake_mode, make), ()
    with assumptions(fake_mode.shape_env) as assumed:
        made = made_within_tracing(fake_mode, make)
    return made, tuple(dict.fromkeys(assumed))


@contextmanager
def assumptions(shape_env: ShapeEnv) -> Iterator[list[sympy.Basic]]:
    """What would become guards, but for those that stand, is put on a list instead."""
    known, assumed = {shape_env.simplify(guard.expr) for guard in shape_env.guards}, []

    def note(asked: sympy.Basic, answer: sympy.Basic) -> None:
        statement = shape_env.simplify(stated(asked, answer))
        if statement not in known:
            assumed.append(statement)

    ShapeEnv._inner_evaluate_expr.cache_clear()  # an answer that is remembered is not noted
    shape_env._check_frozen = note
    try:
        with shape_env.suppress_guards():
            yield assumed
    finally:
        del shape_env._check_frozen


def stated(asked: sympy.Basic, answer: sympy.Basic) -> sympy.Basic:
    """What is taken for granted by who answers a question so."""
    if answer is sympy.true:
        return asked
    return sympy.Not(asked) if answer is sympy.false else sympy.Eq(asked, answer)
