"""Minimal runs of the CUDA code, a prompt and a few tokens, against the uncompiled model."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from conftest import LOSSLESS, greedy, prompt
from specache_compile.runtime.records import find_record

pytestmark = pytest.mark.gpu


def test_the_uncompiled_model_generates_the_same_on_both(llama: LlamaForCausalLM) -> None:
    ids = prompt(40, 2)
    on_device = copy.deepcopy(llama).cuda()
    assert torch.equal(greedy(on_device, ids.cuda(), 6).cpu(), greedy(llama, ids, 6))


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_a_decode_equals_the_uncompiled_model_on_the_cpu(llama: LlamaForCausalLM, lowering: str) -> None:
    twin = copy.deepcopy(llama).cuda()
    twin.compile(backend="specache", options={**LOSSLESS, "top_k": 128, "lowering": lowering})
    ids = prompt(75)
    assert torch.equal(greedy(twin, ids.cuda(), 6).cpu(), greedy(llama, ids, 6))


@pytest.mark.skipif("SIMULATED_DEVICE" not in os.environ, reason="a real device may not notice")
def test_no_kernel_leaves_a_tensor() -> None:
    """Each tensor is a separate allocation; the caching allocator would hide accesses to adjacent memory."""
    decode = f"{__file__}::test_a_decode_equals_the_uncompiled_model_on_the_cpu[eager]"
    alone = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", decode]
    done = subprocess.run(command, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "1 passed" in done.stdout


@pytest.mark.quick_for("16")
@pytest.mark.parametrize(
    "options", [{"bits": 16, "top_k": 0, "min_context": 0}, {**LOSSLESS, "lowering": "inductor"}], ids=["16", "1"]
)
def test_inductor_runs_a_prefill_without_a_mask(llama: LlamaForCausalLM, options: dict[str, Any]) -> None:
    twin = copy.deepcopy(llama.cuda())
    twin.compile(backend="specache", options=options)
    ids = prompt(100).cuda()
    with torch.no_grad():
        torch.testing.assert_close(
            twin(ids, use_cache=True).logits, llama(ids, use_cache=True).logits, atol=1e-3, rtol=0
        )


def test_a_prefill_takes_a_mask_where_something_is_padded_alone(llama: LlamaForCausalLM) -> None:
    """Like `generate` before transformers 5.18, which masks every prompt: check tokens, and the masks of SDPA calls."""
    twin = copy.deepcopy(llama.cuda())
    twin.compile(backend="specache", options={**LOSSLESS, "top_k": 64})
    ids = prompt(40, 2).cuda()
    ones = torch.ones_like(ids)
    left = ones.clone()
    left[1, :20] = 0
    for mask in (ones, left):
        expected = greedy(llama, ids, 2, attention_mask=mask)
        assert torch.equal(greedy(twin, ids, 2, attention_mask=mask), expected)
    record = find_record(twin)
    assert record is not None
    forms = [form for graph in record.graphs if graph.phase == "prefill" for form in graph.rewrites.made.values()]
    takes = [
        node.kwargs.get("attn_mask") is not None
        for form in forms
        for node in form.graph_module.graph.nodes
        if node.target is torch.nn.functional.scaled_dot_product_attention
    ]
    assert sorted(takes) == [False, False, True, True]
