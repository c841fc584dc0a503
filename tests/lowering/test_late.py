"""Graphs built during a generation: each step checks their assumptions about symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from transformers import DynamicCache

import specache_compile as sc
from conftest import LOSSLESS, compiled_with, prompt, tiny_llama
from specache_compile.compat import cache_of, with_cache
from specache_compile.compile.rewrites import Rewrites, Rewritten
from specache_compile.lowering.late import guards, made_within_tracing
from specache_compile.runtime.records import find_record
from specache_compile.runtime.symbols import SymbolReader

ROWS, COLUMNS, STRIDE = 7, 5, 11


@pytest.fixture
def fake() -> Any:
    """Return a fake [s0, s1] with a symbolic stride; the symbols have the hints 7, 5 and 11."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC])
    return mode.from_tensor(torch.empty(ROWS, STRIDE)[:, :COLUMNS], symbolic_context=context)


def assumed(fake: Any, make: Callable[[], object]) -> tuple[sympy.Basic, ...]:
    """Return the assumptions of a graph that is built after Dynamo's checks."""
    made_within_tracing(fake.fake_mode, make)
    return guards(fake.fake_mode)


def test_a_late_graph_records_its_assumptions(fake: Any) -> None:
    rows, columns = (size.node.expr for size in fake.shape)
    assert assumed(fake, lambda: fake.shape[0] * 2) == ()
    assert assumed(fake, lambda: bool(fake.shape[0] > fake.shape[1])) == (rows > columns,)


@pytest.mark.parametrize(
    "query",
    [
        lambda fake: bool(fake.shape[0] == fake.shape[1] + 2),
        lambda fake: fake.is_contiguous(),
        lambda fake: torch.cat([fake, torch.empty_like(fake)[:, :COLUMNS]], 1),
        lambda fake: fake.fake_mode.shape_env.guard_or_defer_runtime_assert((fake.shape[0] < 100).node.expr, ""),
    ],
    ids=["a size", "contiguity", "an op", "a check of Inductor's"],
)
def test_the_next_late_graph_records_cached_ones_too(fake: Any, query: Callable[[Any], object]) -> None:
    first = assumed(fake, lambda: query(fake))
    assert first
    assert assumed(fake, lambda: query(fake)) == first


def test_dynamos_guards_are_no_assumptions(fake: Any) -> None:
    made_within_tracing(fake.fake_mode, lambda: bool(fake.shape[0] * fake.shape[1] % 3 == 2))
    checked = guards(fake.fake_mode)
    assert checked
    made_within_tracing(fake.fake_mode, lambda: bool(fake.shape[0] * fake.shape[1] % 3 == 2))
    assert guards(fake.fake_mode) == checked


def test_sizes_strides_and_offsets_are_read_from_a_call(fake: Any) -> None:
    reader = SymbolReader([fake])
    (close,) = assumed(fake, lambda: bool(fake.stride(0) != fake.shape[1]))
    assert reader.holds(close, [torch.empty(3, 8)[:, :4]])
    assert not reader.holds(close, [torch.empty(3, 4)])
    assert not SymbolReader([]).can_read(close)


def test_a_size_is_read_that_dynamo_has_found_equal_to_another(fake: Any) -> None:
    """For example the sizes of embeddings and of their positions, whichever symbol Dynamo keeps."""
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    other = fake.fake_mode.from_tensor(torch.empty(ROWS), symbolic_context=context)
    made_within_tracing(fake.fake_mode, lambda: bool(fake.shape[0] == other.shape[0]))
    reader, call = SymbolReader([fake, other]), [torch.empty(3, 4), torch.empty(3)]
    assert [reader.value(size, call) for size in (fake.shape[0], other.shape[0])] == [3, 3]


def test_a_size_is_read_though_a_late_graph_assumes_it(fake: Any) -> None:
    """Earlier graphs accept any size."""
    reader = SymbolReader([fake])
    assert assumed(fake, lambda: int(fake.shape[0]))
    assert reader.value(fake.shape[0], [torch.empty(3, 4)]) == 3


EVICTS = {"lowering": "eager", "method": "h2o", "budget": 64}


@pytest.fixture(params=[LOSSLESS])
def step(request: pytest.FixtureRequest) -> Callable[[], int]:
    """Return a function that runs a decode step after 250 tokens, and returns the number of cached tokens."""
    twin = compiled_with(tiny_llama(num_hidden_layers=1), request.param)
    with torch.no_grad():
        cache = cache_of(twin(prompt(250), **with_cache(DynamicCache(config=twin.config))))

    def once() -> int:
        with torch.no_grad():
            twin(prompt(1), **with_cache(cache))
        return cache.get_seq_length()

    once.model = twin  # type: ignore[attr-defined]
    return once


def decodes(step: Any) -> Rewrites:
    """Return the rewrites of the decode graph."""
    (graph,) = (graph for graph in find_record(step.model).graphs if graph.captured.phase.name == "decode")
    return graph.rewrites


@pytest.mark.parametrize("step", [LOSSLESS, EVICTS], indirect=True, ids=["specache", "h2o"])
def test_a_call_of_other_sizes_is_refused(step: Callable[[], int]) -> None:
    """The error comes before the step, and leaves the cache unchanged, also under an eviction policy."""
    step()
    rewrites, at = decodes(step), step()
    size = next(iter(rewrites.captured.symbols.places))
    variant = next(variant for variant in rewrites.made if variant.phase.name == "decode")
    rewrites.made[variant] = replace(rewrites.made[variant], assumes=(sympy.Eq(size, 1),))
    with pytest.raises(sc.SpecacheError, match=rf"valid only for Eq\({size}, 1\).*_dynamo.reset"):
        step()
    rewrites.made[variant] = replace(rewrites.made[variant], assumes=(sympy.Ne(size, 1),))
    assert step() == at + 1


def test_a_graph_is_refused_whose_assumptions_no_call_shows(step: Callable[[], int]) -> None:
    step()
    rewrites = decodes(step)
    (symbol, _), *_ = rewrites.captured.symbols.places.items()
    size = next(
        size
        for fake in rewrites.captured.fakes
        for size in ((fake,) if isinstance(fake, torch.SymInt) else getattr(fake, "shape", ()))
        if isinstance(size, torch.SymInt) and size.node.expr == symbol
    )
    made = next(iter(rewrites.made.values()))
    rewrites.captured.symbols.places.clear()

    def assuming() -> Rewritten:
        assert size % 1009 != 1008
        return made

    with pytest.raises(sc.SpecacheError, match="which no argument of a call shows"):
        rewrites.late(assuming)
