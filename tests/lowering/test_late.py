"""Graphs for a bucket that a running generation grows into: what they assume of symbolic sizes, each step checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from transformers import DynamicCache, LlamaForCausalLM

import specache_compile as sc
from conftest import compile_copy, prompt
from specache_compile.lowering.late import made_late, made_within_tracing
from specache_compile.runtime.records import find_record
from specache_compile.runtime.symbols import SymbolReader

ROWS, COLUMNS, STRIDE = 7, 5, 11


@pytest.fixture
def fake() -> Any:
    """[s0, s1] with a stride of its own: symbols that stand for 7, 5 and 11."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC])
    return mode.from_tensor(torch.empty(ROWS, STRIDE)[:, :COLUMNS], symbolic_context=context)


def test_what_dynamo_hears_it_guards(fake: Any) -> None:
    assert made_within_tracing(fake.fake_mode, lambda: bool(fake.shape[0] == ROWS))
    assert len(fake.fake_mode.shape_env.guards) == 1


def test_what_it_does_not_is_told(fake: Any) -> None:
    """Each time, also where torch remembers its answer; and no guard is left that a later graph would build on."""
    rows = fake.shape[0].node.expr
    for _ in range(2):
        assert made_late(fake.fake_mode, lambda: bool(fake.shape[0] == ROWS)) == (True, (sympy.Eq(rows, ROWS),))
        assert made_late(fake.fake_mode, lambda: bool(fake.shape[0] == 6)) == (False, (sympy.Ne(rows, 6),))
        assert made_late(fake.fake_mode, lambda: int(fake.shape[0])) == (ROWS, (sympy.Eq(rows, ROWS),))
    assert fake.shape[0].node.expr == rows
    assert not fake.fake_mode.shape_env.guards


def test_what_dynamo_guards_already_is_not(fake: Any) -> None:
    rows, columns = fake.shape
    made_within_tracing(fake.fake_mode, lambda: bool(rows * columns % 3 == 2))
    assert made_late(fake.fake_mode, lambda: bool(rows * columns % 3 == 2)) == (True, ())


def test_sizes_and_strides_of_a_call_are_compared_with_what_was_told(fake: Any) -> None:
    reader = SymbolReader([fake])
    _, (close,) = made_late(fake.fake_mode, lambda: bool(fake.stride(0) == fake.shape[1]))
    assert reader.holds(close, [torch.empty(3, 8)[:, :4]])
    assert not reader.holds(close, [torch.empty(3, 4)])
    assert not SymbolReader([]).holds(close, []), "what cannot be read is not taken for granted"


@torch.no_grad()
def test_a_call_of_other_sizes_is_refused(llama: LlamaForCausalLM) -> None:
    """In words, before the step: the cache is as it was."""
    twin = compile_copy(llama, bits=1)
    cache = twin(prompt(250), past_key_values=DynamicCache(config=twin.config)).past_key_values
    for _ in range(3):
        twin(prompt(1), past_key_values=cache)
    (graph,) = (graph for graph in find_record(twin).graphs if graph.phase == "decode")
    made = graph.rewrites.made
    past = next(iter(graph.captured.symbols.places))
    variant = next(variant for variant in made if variant.phase.name == "decode")
    made[variant] = replace(made[variant], assumes=(sympy.Eq(past, 1),))
    with pytest.raises(sc.SpecacheError, match=rf"calls with Eq\({past}, 1\).*_dynamo.reset"):
        twin(prompt(1), past_key_values=cache)
    made[variant] = replace(made[variant], assumes=(sympy.Ne(past, 1),))
    twin(prompt(1), past_key_values=cache)
    assert cache.get_seq_length() == 254
