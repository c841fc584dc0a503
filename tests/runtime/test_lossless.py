"""Settings that lose nothing give the uncompiled model's tokens, in every way a cache is used: setting × way."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from conftest import compiled_with, greedy, is_held, prompt, tiny_llama
from specache_compile.compat import cache_of, with_cache

pytestmark = [pytest.mark.one_process, pytest.mark.one_trace]

SMALL = {"group_size": 32, "residual_length": 32, "top_k": 1024}
BEST = {**SMALL, "setting": "best", "host_bits": 16}
DEFAULT = "specache, corrected"
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "offload": {"method": "offload"},
    "kcache": {"method": "kcache", "top_n": 4096},
    "kivi, 16 bits": {"method": "kivi", "bits": 16},
    "specache, 1 bit": {**SMALL, "setting": "paper", "bits": 1},
    DEFAULT: BEST,
    "specache, two lanes": {**BEST, "speculate": True},
    "snapkv": {"method": "snapkv", "budget": 4096},
    "expected_attention": {"method": "expected_attention", "budget": 4096},
    "roco": {"method": "roco", "budget": 4096},
}
# Their pairs are of one prompt: what was evicted for it cannot be cropped back, nor chosen again behind a turn.
EVICTING = ("snapkv", "expected_attention", "roco")


def tokens(model: LlamaForCausalLM) -> Tensor:
    """Beyond the recent tier (64), and by a group."""
    return greedy(model, prompt(75, 2), 60)


def padding(model: LlamaForCausalLM) -> Tensor:
    """Rows of different lengths, one of which has less than a group."""
    ids, mask = prompt(90, 3), torch.ones(3, 90, dtype=torch.int64)
    mask[0, :17], mask[2, :81] = 0, 0
    return greedy(model, ids, 40, attention_mask=mask, pad_token_id=0)


def beams(model: LlamaForCausalLM) -> Tensor:
    """Rows are reordered."""
    return greedy(model, prompt(90, 2), 40, num_beams=3)


@torch.no_grad()
def turns(model: LlamaForCausalLM) -> Tensor:
    """Several tokens at a time on one cache, and one."""
    cache, ids = DynamicCache(), prompt(171)
    spans = ((0, 90), (90, 91), (91, 130), (130, 131), (131, 171))
    return torch.cat([model(ids[:, a:b], **with_cache(cache), use_cache=True).logits for a, b in spans], 1)


@torch.no_grad()
def copies(model: LlamaForCausalLM) -> Tensor:
    """A cache is cropped and copied; it and the copy go on. Then the copy is cropped to nothing, and filled again."""
    out = model(prompt(90, 2), use_cache=True)
    for token in prompt(12, 2, seed=4).split(1, 1):
        out = model(token, **with_cache(cache_of(out)), use_cache=True)
    cache_of(out).crop(-22)
    logits = []
    for kept in (cache_of(out), copy.deepcopy(cache_of(out))):
        for given in (prompt(9, 2, seed=6), *prompt(8, 2, seed=7).split(1, 1)):
            logits.append(model(given, **with_cache(kept), use_cache=True).logits)
    kept.crop(-kept.get_seq_length())
    logits.append(model(prompt(30, 2, seed=8), **with_cache(kept), use_cache=True).logits)
    assert is_held(kept) == is_held(cache_of(out))
    return torch.cat(logits, 1)


WAYS = {way.__name__: way for way in (tokens, padding, beams, turns, copies)}
GRID = [(name, way) for name in SETTINGS for way in WAYS if not (name in EVICTING and way == "copies")]


@functools.cache
def uncompiled(way: str) -> Tensor:
    return WAYS[way](tiny_llama())


@pytest.mark.quick_for(*(f"{name}, {way}" for name, way in GRID if name == DEFAULT or way == "turns"))
@pytest.mark.parametrize(("name", "way"), GRID, ids=[f"{name}, {way}" for name, way in GRID])
def test_lossless_options_generate_what_the_uncompiled_model_generates(
    llama: LlamaForCausalLM, name: str, way: str
) -> None:
    ours = WAYS[way](compiled_with(llama, {"lowering": "eager", **SETTINGS[name]}))
    torch.testing.assert_close(ours, uncompiled(way), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def reordered(model: LlamaForCausalLM, ids: Tensor, rows: Tensor) -> Tensor:
    """Logits of each token behind the first 70, with the rows in another order from the 80th on."""
    cache, found = DynamicCache(), []
    model(ids[:, :70], **with_cache(cache))
    for place in range(70, ids.shape[1]):
        if place == 80:
            cache.reorder_cache(rows)
        found.append(model(ids[:, place : place + 1], **with_cache(cache)).logits)
    return torch.cat(found, 1)


@pytest.mark.quick_for(DEFAULT, "roco")
@pytest.mark.parametrize("name", [DEFAULT, "kcache", "roco"])
def test_a_default_device_of_the_program_is_not_that_of_the_tiers(llama: LlamaForCausalLM, name: str) -> None:
    """Nothing can be computed on the meta device, so a tensor that is created there by mistake is found."""
    ids, rows = prompt(110, 2), torch.tensor([1, 1])
    with torch.device("meta"):
        found = reordered(compiled_with(llama, {"lowering": "eager", **SETTINGS[name]}), ids, rows)
    torch.testing.assert_close(found, reordered(tiny_llama(), ids, rows), atol=1e-3, rtol=1e-3)
