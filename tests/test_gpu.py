"""The same promises on a CUDA device: `pytest -m gpu`."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

import specache_compile as sc
from conftest import LOSSLESS, greedy, prompt
from specache_compile.records import find_record

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("speculate", [True, False], ids=["two lanes", "one lane"])
def test_greedy_tokens_equal_the_uncompiled_models(llama: LlamaForCausalLM, lowering: str, speculate: bool) -> None:
    model = llama.cuda()
    twin = copy.deepcopy(model)
    twin.compile(backend="specache", options={**LOSSLESS, "lowering": lowering, "speculate": speculate})
    ids = prompt(75, 2).cuda()
    assert torch.equal(greedy(twin, ids, 120), greedy(model, ids, 120))


def test_the_host_tier_is_pinned_and_the_rest_is_on_the_device(llama: LlamaForCausalLM) -> None:
    twin = llama.cuda()
    twin.compile(backend="specache", options=LOSSLESS)
    with torch.no_grad():
        cache = twin(prompt(100).cuda(), use_cache=True).past_key_values
    for layer in cache.layers[0].keys.handle.session.state:
        assert layer["host"].is_pinned()
        assert all(tensor.is_cuda for name, tensor in layer.items() if name != "host")


def test_turns_crops_and_forks(llama: LlamaForCausalLM) -> None:
    model = llama.cuda()
    twin = copy.deepcopy(model)
    twin.compile(backend="specache", options=LOSSLESS)

    def run(m: LlamaForCausalLM) -> torch.Tensor:
        with torch.no_grad():
            cache = m(prompt(130).cuda(), use_cache=True).past_key_values
            fork = copy.deepcopy(cache)
            m(prompt(20).cuda(), past_key_values=cache)
            cache.crop(-30)
            return torch.stack([m(prompt(1).cuda(), past_key_values=c).logits for c in (cache, fork)])

    torch.testing.assert_close(run(twin), run(model), atol=1e-3, rtol=1e-3)


def test_device_memory_for_kv_is_what_explain_predicted(llama: LlamaForCausalLM) -> None:
    twin = llama.cuda()
    twin.compile(backend="specache", options=LOSSLESS)
    greedy(twin, prompt(600).cuda(), 3)
    predicted = sc.explain(llama, 602, 1, LOSSLESS).device_bytes
    assert sc.stats(twin).device_bytes == pytest.approx(predicted, rel=0.02)
    assert find_record(twin) is not None
