"""In-place writes to a graph's inputs become values in the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, symbolic_trace

from specache_compile.passes.reading.in_place import take_writes, unknown_write


def whole(state: Tensor, new: Tensor) -> Tensor:
    state.copy_(state * 0.5 + new)
    return state.sum()


def by_head(state: Tensor, new: Tensor) -> Tensor:
    """Write as Zamba writes its recurrent state."""
    for head in range(3):
        part = state[:, head]
        part.copy_(part * 0.5 + new)
    return state.sum()


def read_late(state: Tensor, new: Tensor) -> Tensor:
    part = state[:, 0]
    part.copy_(new)
    return part.sum()


def some_rows(state: Tensor, new: Tensor) -> Tensor:
    state[1:].copy_(new)
    return state.sum()


def captured(function: Callable[..., Tensor]) -> GraphModule:
    """Return the function's graph, with fakes of placeholders and views."""
    graph_module = symbolic_trace(function)
    with FakeTensorMode() as mode:
        state = mode.from_tensor(torch.zeros(2, 3, 4))
        for node in graph_module.graph.nodes:
            if node.op == "placeholder":
                node.meta["example_value"] = state if node.name == "state" else mode.from_tensor(torch.zeros(2, 4))
            elif node.name.startswith("getitem"):
                node.meta["example_value"] = state[node.args[1]]
    return graph_module


@pytest.mark.parametrize("function", [whole, by_head])
def test_a_write_becomes_a_value_for_later_readers(function: Callable[..., Tensor]) -> None:
    state, new = torch.randn(2, 3, 4), torch.randn(2, 4 if function is by_head else 1)
    new = new if function is by_head else new[:, None]
    expected_state = state.clone()
    expected = function(expected_state, new)
    graph_module = captured(function)
    assert unknown_write(graph_module) is None
    ((_, value),) = take_writes(graph_module).items()
    graph = graph_module.graph
    graph.output((graph.find_nodes(op="output")[0].args[0], value))
    graph.erase_node(graph.find_nodes(op="output")[0])
    graph_module.recompile()
    before = state.clone()
    returned, made = graph_module(state, new)
    assert torch.equal(state, before)
    assert torch.equal(returned, expected)
    assert torch.equal(made, expected_state)


@pytest.mark.parametrize("function", [read_late, some_rows])
def test_parts_that_are_read_later_and_slices_are_no_values(function: Callable[..., Tensor]) -> None:
    assert unknown_write(captured(function)).target == "copy_"
