"""Stored graphs from Inductor are never confused with each other."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from specache_compile.lowering.kept import NotKeepable, data_of, lowered_from
from specache_compile.lowering.lower import lower


def doubled(x: Tensor) -> Tensor:
    """A function outside torch: AOTAutograd cannot hash a graph that calls it."""
    return x * 2


def summed(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def graph_of(function: Callable[..., Tensor], count: int) -> GraphModule:
    graph = Graph()
    inputs = [graph.placeholder(f"x{number}") for number in range(count)]
    graph.output((graph.call_function(function, tuple(inputs)),))
    return GraphModule(torch.nn.Module(), graph)


def test_graphs_with_equal_random_states_are_not_confused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECACHE_CACHE", "/a/folder")
    x = torch.arange(4.0)
    state = random.getstate()
    made = []
    for function, count in ((doubled, 1), (summed, 2)):
        random.setstate(state)
        made.append(lower(graph_of(function, count), [x] * count, "inductor", {}, None))
        assert random.getstate() == state
    for again in (False, True):
        first, second = [lowered_from(data_of(each)) for each in made] if again else made
        torch.testing.assert_close(first(x)[0], 2 * x)
        torch.testing.assert_close(second(x, 10 * x)[0], 11 * x)


@pytest.mark.parametrize("argument", [torch.zeros(1), slice(None, torch.zeros(1))], ids=["tensor", "slice"])
def test_a_graph_with_an_argument_that_has_no_source_is_refused(argument: object) -> None:
    graph = Graph()
    graph.output((graph.call_function(doubled, (graph.placeholder("x"), argument)),))
    with pytest.raises(NotKeepable):
        data_of(GraphModule(torch.nn.Module(), graph))


def test_a_graphs_constants_are_the_same_from_its_source() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    made = graph.call_function(
        torch.full_like, (x, float("-inf")), {"dtype": torch.float64, "device": torch.device("cpu")}
    )
    graph.output((graph.call_function(doubled, (made,)), 0.1, None))
    run = lowered_from(data_of(GraphModule(torch.nn.Module(), graph)))
    filled, number, nothing = run(torch.zeros(2))
    assert filled.tolist() == [float("-inf")] * 2
    assert (filled.dtype, number, nothing) == (torch.float64, 0.1, None)
