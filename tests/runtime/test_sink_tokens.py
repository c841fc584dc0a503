"""The first tokens in 16 bits (option `sink_tokens`), from the options to a cache that is edited.

With 64 sinks, R = 32 and g = 32, each of the first 128 tokens is a sink or in the window, so nothing is rounded. At 1
bit the tokens are then those of the uncompiled model, unless a pair is in a wrong place.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import specache_compile as sc
from conftest import compiled_with, greedy, left_padding, prompt, step
from held_tiers import interrupted_behind
from specache_compile.compat import cache_of, with_cache
from specache_compile.runtime.session import session_of

pytestmark = [pytest.mark.one_process, pytest.mark.one_trace]

ALL_SINKS = {
    "lowering": "eager", "bits": 1, "group_size": 32, "residual_length": 32, "sink_tokens": 64, "min_context": 0,
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "kivi": {"method": "kivi"},
    "kivi without a host tier": {"method": "kivi", "host_tier": False},
    "corrected": {"top_k": 4, "host_bits": 16},
    "two lanes": {"setting": "paper", "top_k": 4},
}  # fmt: skip


@pytest.fixture(params=METHODS)
def twin(request: pytest.FixtureRequest, llama: LlamaForCausalLM) -> LlamaForCausalLM:
    return compiled_with(llama, {**ALL_SINKS, **METHODS[request.param]})


@pytest.mark.quick_for("kivi without a host tier-90", "corrected-3")
@pytest.mark.parametrize("length", [3, 90])
def test_while_every_token_is_a_sink_or_in_the_window_nothing_is_rounded(
    llama: LlamaForCausalLM, twin: LlamaForCausalLM, length: int
) -> None:
    """A prompt that is shorter than its sinks, too: the tokens behind it are."""
    ids = prompt(length, 2)
    assert torch.equal(greedy(twin, ids, 126 - length), greedy(llama, ids, 126 - length))


@pytest.mark.quick_for("two lanes")
def test_padding_is_not_counted(llama: LlamaForCausalLM, twin: LlamaForCausalLM) -> None:
    """The second row's 100 tokens of padding and its first 64 of text make the low-bit tier, whose range they leave."""
    ids = prompt(160, 2)
    mask = left_padding(ids, 0, 100)
    expected = greedy(llama, ids, 30, attention_mask=mask)
    assert torch.equal(greedy(twin, ids, 30, attention_mask=mask)[1], expected[1])


@pytest.mark.quick_for("corrected")
@pytest.mark.parametrize("method", ["kivi", "corrected"])
def test_they_outlive_chunks_crops_forks_rows_and_a_file(llama: LlamaForCausalLM, tmp_path: Path, method: str) -> None:
    twin = compiled_with(llama, {**ALL_SINKS, **METHODS[method]})
    ids = prompt(126, 2)
    cache = None
    for start, stop in ((0, 2), (2, 50), (50, 100)):
        cache = cache_of(step(twin, ids[:, start:stop], cache))
    cache.crop(-60)
    step(twin, ids[:, 40:100], cache)
    other = copy.deepcopy(cache)
    cache.batch_select_indices(torch.tensor([1, 0]))
    sc.save(cache, tmp_path)
    loaded = sc.load(tmp_path, twin)
    order = {id(cache): [1, 0], id(loaded): [1, 0], id(other): [0, 1]}
    expected = greedy(llama, ids[:, :101], 24)
    for each in (cache, loaded, other):
        rows = order[id(each)]
        assert torch.equal(greedy(twin, ids[rows, :101], 24, **with_cache(each)), expected[rows])


@pytest.mark.quick_for("corrected")
@pytest.mark.parametrize("method", ["kivi", "corrected"])
def test_an_interrupted_step_leaves_them(llama: LlamaForCausalLM, method: str) -> None:
    """The first group leaves the window with the fourth step behind the prompt."""
    twin = compiled_with(llama, {**ALL_SINKS, **METHODS[method]})
    interrupted_behind([1, 4, 5], twin, llama, prompt(60, 2), 50)


def test_what_is_fetched_is_no_sink(llama: LlamaForCausalLM) -> None:
    twin = compiled_with(llama, {**ALL_SINKS, "sink_tokens": 4, "top_k": 28})
    cache = cache_of(step(twin, prompt(66, 2)))
    for token in prompt(30, 2, seed=2).split(1, 1):
        step(twin, token, cache)
        session = session_of(cache)
        session.tiers.drain()
        for state in session.state:
            assert state["sink_index"][:, 0].tolist() == [[0, 1, 2, 3]] * 2
            assert not torch.isin(state["slot_index"], state["sink_index"]).any()
