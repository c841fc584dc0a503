"""Settings that lose nothing give the uncompiled model's tokens, in every way a cache is used: setting × way."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from conftest import eager, greedy, is_held, left_padding, prompt, step, tiny_llama
from specache_compile.compat import cache_of

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
    ids = prompt(90, 3)
    return greedy(model, ids, 40, attention_mask=left_padding(ids, 17, 0, 81), pad_token_id=0)


def beams(model: LlamaForCausalLM) -> Tensor:
    """Rows are reordered."""
    return greedy(model, prompt(90, 2), 40, num_beams=3)


def turns(model: LlamaForCausalLM) -> Tensor:
    """Several tokens at a time on one cache, and one."""
    cache, ids = DynamicCache(), prompt(171)
    spans = ((0, 90), (90, 91), (91, 130), (130, 131), (131, 171))
    return torch.cat([step(model, ids[:, a:b], cache).logits for a, b in spans], 1)


def copies(model: LlamaForCausalLM) -> Tensor:
    """A cache is cropped and copied; it and the copy go on. Then the copy is cropped to nothing, and filled again."""
    cache = cache_of(step(model, prompt(90, 2)))
    for token in prompt(12, 2, seed=4).split(1, 1):
        step(model, token, cache)
    cache.crop(-22)
    logits = []
    for kept in (cache, copy.deepcopy(cache)):
        for given in (prompt(9, 2, seed=6), *prompt(8, 2, seed=7).split(1, 1)):
            logits.append(step(model, given, kept).logits)
    kept.crop(-kept.get_seq_length())
    logits.append(step(model, prompt(30, 2, seed=8), kept).logits)
    assert is_held(kept) == is_held(cache)
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
    ours = WAYS[way](eager(llama, **SETTINGS[name]))
    torch.testing.assert_close(ours, uncompiled(way), rtol=1e-3, atol=1e-3)


def reordered(model: LlamaForCausalLM, ids: Tensor, rows: Tensor) -> Tensor:
    """Logits of each token behind the first 70, with the rows in another order from the 80th on."""
    cache, found = DynamicCache(), []
    step(model, ids[:, :70], cache)
    for place in range(70, ids.shape[1]):
        if place == 80:
            cache.reorder_cache(rows)
        found.append(step(model, ids[:, place : place + 1], cache).logits)
    return torch.cat(found, 1)


@pytest.mark.quick_for(DEFAULT, "roco")
@pytest.mark.parametrize("name", [DEFAULT, "kcache", "roco"])
def test_a_default_device_of_the_program_is_not_that_of_the_tiers(llama: LlamaForCausalLM, name: str) -> None:
    """Nothing can be computed on the meta device, so a tensor that is created there by mistake is found."""
    ids, rows = prompt(110, 2), torch.tensor([1, 1])
    with torch.device("meta"):
        found = reordered(eager(llama, **SETTINGS[name]), ids, rows)
    torch.testing.assert_close(found, reordered(tiny_llama(), ids, rows), atol=1e-3, rtol=1e-3)
