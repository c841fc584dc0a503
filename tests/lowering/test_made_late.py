"""Graphs for a bucket that a running generation grows into: nobody would check what they assume of symbolic sizes."""

from __future__ import annotations

import pytest
import torch
from torch import SymInt
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from specache_compile.lowering.lower import within_tracing

ROWS, COLUMNS = 7, 5


@pytest.fixture
def fake() -> torch.Tensor:
    """[s0, s1] with strides of their own: symbols that stand for 7, 5, 11 and 1."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC])
    return mode.from_tensor(torch.empty(ROWS, 11)[:, :COLUMNS], symbolic_context=context)


def made(fake: torch.Tensor, make: object, late: bool = True) -> object:
    return within_tracing(fake.fake_mode, make, late)  # type: ignore[attr-defined, arg-type]


def test_in_dynamos_hearing_it_may_assume(fake: torch.Tensor) -> None:
    assert made(fake, lambda: bool(fake.shape[0] == ROWS), late=False) is True
    assert [str(guard.expr) for guard in fake.fake_mode.shape_env.guards]  # type: ignore[attr-defined]


def test_later_it_may_not(fake: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="new guards"):
        made(fake, lambda: bool(fake.shape[0] == ROWS))
    rows = fake.shape[0]
    assert isinstance(rows, SymInt), "and the refused one left nothing behind"
    assert not rows.node.expr.is_number
    assert not fake.fake_mode.shape_env.guards  # type: ignore[attr-defined]


def test_what_torch_asks_for_its_own_ease_is_no_assumption(fake: torch.Tensor) -> None:
    """Of a layer that slides, whose keys are a view of longer ones, it asks whether they lie close."""
    assert made(fake, lambda: torch._prims_common.is_contiguous_or_false(fake)) is False


def test_what_a_stored_graph_assumes_is_not_taken_over(fake: torch.Tensor) -> None:
    """Inductor's caches give back graphs of another process, with what that has assumed."""
    asked = []

    def make() -> str:
        stored = torch._inductor.config.fx_graph_cache and torch._functorch.config.enable_autograd_cache
        asked.append(stored)
        return "assumes" if stored and fake.shape[0] == ROWS else "made anew"

    with torch._inductor.config.patch(fx_graph_cache=True), torch._functorch.config.patch(enable_autograd_cache=True):
        assert made(fake, make) == "made anew"
    assert asked == [True, False]
