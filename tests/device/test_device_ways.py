"""Uses of a cache on a CUDA device: with every pair fetched, tokens equal the uncompiled model's."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

import specache_compile as sc
from conftest import LOSSLESS, compiled_with, greedy, greedy_unmasked, prompt, tiny_llama
from specache_compile.compat import cache_of, with_cache
from specache_compile.kernels.movement import triton_copy

pytestmark = [pytest.mark.gpu, pytest.mark.one_process]

OPTIONS = {**LOSSLESS, "top_k": 128, "min_context": 0}
TOKENS = 6
whole = pytest.mark.slow


def on_device(model: LlamaForCausalLM, device: str = "cuda", **options: Any) -> Any:
    return compiled_with(copy.deepcopy(model).to(device), {**OPTIONS, **options})


@pytest.fixture
def ids() -> torch.Tensor:
    return prompt(75)


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"prefill_chunk_size": 32}], ids=["beams", "a prefill in chunks"])
def test_a_generation(llama: LlamaForCausalLM, ids: torch.Tensor, how: dict[str, Any]) -> None:
    assert torch.equal(greedy(on_device(llama), ids.cuda(), TOKENS, **how).cpu(), greedy(llama, ids, TOKENS, **how))


@pytest.mark.parametrize(
    "options",
    [{"verify": 4}, pytest.param({"verify": "auto", "top_k": 8, "mode": "reduce-overhead"}, marks=whole)],
    ids=["drafts", "as many as pay, recorded"],
)
def test_what_is_drafted_is_verified(llama: LlamaForCausalLM, ids: torch.Tensor, options: dict[str, Any]) -> None:
    twin = on_device(llama, **options)
    assert torch.equal(greedy(twin, ids.cuda(), 12).cpu(), greedy(llama, ids, 12))
    assert sc.stats(twin).verification is not None


@torch.no_grad()
def continued(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    return torch.stack(
        [model(ids[:, place, None], **with_cache(cache)).logits[:, -1].cpu() for place in range(ids.shape[1])]
    )


@pytest.mark.parametrize("mode", [None, pytest.param("reduce-overhead", marks=whole)])
def test_crop_fork_save_load_and_materialize(llama: LlamaForCausalLM, tmp_path: Path, mode: str | None) -> None:
    """Each continues from 60 of 75 tokens, after three steps."""
    twin, more = on_device(llama, mode=mode), prompt(4, seed=9)
    with torch.no_grad():
        cache = cache_of(twin(prompt(75).cuda(), use_cache=True))
        expected = continued(llama, cache_of(llama(prompt(75)[:, :60], use_cache=True)), more)
    continued(twin, cache, prompt(3, seed=8).cuda())
    cache.crop(60)
    fork = copy.deepcopy(cache)
    sc.save(cache, tmp_path / "session")
    loaded, plain = sc.load(tmp_path / "session", twin), sc.materialize(cache)
    on_gpu = copy.deepcopy(llama).cuda()
    for model, each in ((twin, cache), (twin, fork), (twin, loaded), (on_gpu, plain)):
        torch.testing.assert_close(continued(model, each, more.cuda()), expected, atol=1e-3, rtol=1e-3)


def test_a_copy_that_stops_loses_nothing(
    llama: LlamaForCausalLM, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin, gather = on_device(llama), triton_copy.gather
    expected = greedy(llama, ids, TOKENS)
    cache = DynamicCache()
    calls: list[int] = []

    def stopping(*given: Any, **grid: int) -> None:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        gather(*given, **grid)

    monkeypatch.setattr(triton_copy, "gather", stopping)
    with pytest.raises(KeyboardInterrupt):
        greedy(twin, ids.cuda(), TOKENS, **with_cache(cache))
    monkeypatch.undo()
    length = cache.get_seq_length()
    assert length >= ids.shape[1]
    rest = ids.shape[1] + TOKENS - 1 - length
    generated = greedy(twin, expected[:, : length + 1].cuda(), rest, **with_cache(cache))
    assert torch.equal(generated.cpu(), expected)


two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@two_devices
def test_a_model_on_each_of_two_devices(llama: LlamaForCausalLM, ids: torch.Tensor) -> None:
    expected = greedy_unmasked(llama, ids, TOKENS)
    for device in ("cuda:1", "cuda:0"):
        twin = on_device(llama, device, mode="reduce-overhead")
        assert torch.equal(greedy_unmasked(twin, ids.to(device), TOKENS).cpu(), expected)


@two_devices
def test_a_model_over_two_devices(tmp_path: Path, ids: torch.Tensor) -> None:
    """device_map splits the model by layers; accelerate's hooks move each layer's inputs."""
    pytest.importorskip("accelerate")
    model = tiny_llama(num_hidden_layers=4)
    model.save_pretrained(tmp_path)
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    places |= {f"model.layers.{number}": number // 2 for number in range(4)}
    twin = LlamaForCausalLM.from_pretrained(tmp_path, device_map=places)
    twin.compile(backend="specache", options=OPTIONS)
    assert torch.equal(greedy(twin, ids.cuda(), TOKENS).cpu(), greedy(model, ids, TOKENS))


@pytest.mark.skipif("SIMULATED_DEVICE" not in os.environ, reason="a real device may not notice")
def test_no_kernel_leaves_a_tensor() -> None:
    """Each tensor is a separate allocation; the caching allocator would hide accesses to adjacent memory."""
    decode = f"{Path(__file__).parents[1]}/kernels/test_gpu.py::test_greedy_tokens_equal_the_uncompiled_models"
    alone = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", decode, "-k", "two and eager"]
    done = subprocess.run(command, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "1 passed" in done.stdout
