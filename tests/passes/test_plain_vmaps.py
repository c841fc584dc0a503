"""A model's own `torch.vmap` in a captured graph becomes plain operations before the passes run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.predispatch import (
    _add_batch_dim,
    _remove_batch_dim,
    _vmap_decrement_nesting,
    _vmap_increment_nesting,
)
from torch.fx import GraphModule
from transformers import LlamaForCausalLM

from conftest import compile_copy, greedy_unmasked, prompt, tiny_llama
from graphs import GraphBuilder, text
from specache_compile.compat import CACHE
from specache_compile.passes.reading.plain_vmaps import plain_vmaps
from specache_compile.runtime.records import find_record


def sums_graph() -> GraphModule:
    """Return all sums of a number of x and one of y, in Dynamo's form of two nested vmaps."""
    builder = GraphBuilder()
    x, y = builder.input("x", 3), builder.input("y", 4)
    builder.call(_vmap_increment_nesting, (), 3, "error")
    one = builder.call(_add_batch_dim, (), x, 0, 1)
    builder.call(_vmap_increment_nesting, (), 4, "error")
    other = builder.call(_add_batch_dim, (), y, 0, 2)
    both = builder.call(torch.add, (), one, other)
    row = builder.call(_remove_batch_dim, (4,), both, 2, 4, 0)
    builder.call(_vmap_decrement_nesting, ())
    rows = builder.call(_remove_batch_dim, (3, 4), row, 1, 3, 0)
    builder.call(_vmap_decrement_nesting, ())
    return builder.finish(builder.call(torch.neg, (3, 4), rows))


def test_plain_operations_compute_the_same() -> None:
    graph_module, x, y = sums_graph(), torch.randn(3), torch.randn(4)
    assert plain_vmaps(graph_module) == 1
    graph_module.graph.lint()
    assert "batch_dim" not in text(graph_module)
    assert "add_1 = aten.add.Tensor(view, y)" in text(graph_module)
    assert torch.equal(graph_module(x, y)[0], -(x[:, None] + y))


def test_a_constant_of_a_vmap_is_a_buffer_of_the_graph(recwarn: pytest.WarningsRecorder) -> None:
    builder = GraphBuilder()
    x = builder.input("x", 3)
    builder.call(_vmap_increment_nesting, (), 3, "error")
    one = builder.call(_add_batch_dim, (), x, 0, 1)
    fixed = builder.call(torch.tensor, (2,), [1.0, 2.0])
    both = builder.call(torch.add, (2,), one, fixed)
    rows = builder.call(_remove_batch_dim, (3, 2), both, 1, 3, 0)
    builder.call(_vmap_decrement_nesting, ())
    graph_module = builder.finish(rows)
    plain_vmaps(graph_module)
    graph_module.graph.lint()
    x = torch.randn(3)
    assert torch.equal(graph_module(x)[0], x[:, None] + torch.tensor([1.0, 2.0]))
    assert [tuple(buffer.shape) for buffer in graph_module.buffers()] == [(2,)]
    assert not [one for one in recwarn if "get_attr" in str(one.message) or "does not reference" in str(one.message)]


def test_a_failed_trace_leaves_no_level_open() -> None:
    builder = GraphBuilder()
    x = builder.input("x", 3)
    builder.call(_vmap_increment_nesting, (), 3, "error")
    one = builder.call(_add_batch_dim, (), x, 0, 1)
    builder.call(torch.Tensor.item, (), one)
    rows = builder.call(_remove_batch_dim, (3,), one, 1, 3, 0)
    builder.call(_vmap_decrement_nesting, ())
    before = _functorch.maybe_current_level()
    with pytest.raises(RuntimeError, match="item"):
        plain_vmaps(builder.finish(rows))
    assert _functorch.maybe_current_level() == before


def no_later(i: Tensor, j: Tensor) -> Tensor:
    return j <= i


class MaskedByVmap(torch.nn.Module):
    """Llama with a prompt mask that is a function of two positions, vmapped over both."""

    def __init__(self, llama: LlamaForCausalLM) -> None:
        super().__init__()
        self.llama = llama

    def forward(self, ids: Tensor, **inputs: Any) -> Any:
        if inputs.get(CACHE) is None:
            tokens = torch.arange(ids.shape[1])
            inputs["attention_mask"] = torch.vmap(torch.vmap(no_later, (None, 0)), (0, None))(tokens, tokens)[
                None, None
            ]
        return self.llama(ids, **inputs)


def test_a_mask_made_with_vmap_is_read() -> None:
    model = MaskedByVmap(tiny_llama(num_hidden_layers=1))
    twin = compile_copy(model)
    expected = greedy_unmasked(model, prompt(40), 8)
    assert torch.equal(greedy_unmasked(twin, prompt(40), 8), expected)
    record = find_record(twin)
    assert {graph.captured.phase.name for graph in record.graphs} == {"prefill", "decode"}
    assert all(graph.captured.sites and graph.captured.is_causal for graph in record.graphs)
