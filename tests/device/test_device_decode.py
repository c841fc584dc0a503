"""Minimal runs of the CUDA code, a prompt and a few tokens, against the uncompiled model."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
from transformers import LlamaForCausalLM

from conftest import LOSSLESS, greedy, prompt

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
