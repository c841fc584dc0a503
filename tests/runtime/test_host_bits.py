"""A host tier of 8 bits (option `host_bits`), from the options to a cache that is edited."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaForCausalLM

from conftest import eager, prompt, step
from held_tiers import in_rows
from specache_compile.compat import cache_of
from specache_compile.kernels.state.stored_pairs import decoded
from specache_compile.methods import parse_options
from specache_compile.runtime.session import session_of
from specache_compile.runtime.step import Step

pytestmark = [pytest.mark.one_process, pytest.mark.one_trace]


@pytest.fixture
def twin(llama: LlamaForCausalLM) -> LlamaForCausalLM:
    return eager(llama, group_size=32, residual_length=32, top_k=16)


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({}, 8), ({"bits": 1}, 8), ({"setting": "paper"}, 16), ({"bits": 16}, 16), ({"top_k": 0}, 16),
        ({"verify": 16}, 16), ({"method": "kivi"}, 16), ({"host_bits": 16}, 16),
        ({"setting": "paper", "host_bits": 8}, 8), ({"method": "kivi", "host_bits": 8}, 8), ({"method": "offload"}, 16),
    ],
    ids=str,
)  # fmt: skip
def test_auto_is_8_where_pairs_are_fetched_to_come_close(options: dict[str, Any], bits: int) -> None:
    assert parse_options(options).bits_on_host == bits


def test_the_host_holds_what_the_full_cache_holds_rounded_once(llama: LlamaForCausalLM, twin: LlamaForCausalLM) -> None:
    ids = prompt(150)
    session = session_of(cache_of(step(twin, ids)))
    session.tiers.drain()
    exact = cache_of(step(llama, ids)).layers[0]
    found = decoded(in_rows(session)[0]["host"][:, :, :150], torch.float32, 16)
    for part, pairs in ((0, exact.keys), (1, exact.values)):
        spacing = pairs.abs().amax(-1, keepdim=True) / 127
        assert ((found[:, :, :, part] - pairs).abs() <= spacing / 2 + 1e-5).all()


def test_a_crop_leaves_the_window_that_is_still_there_exact(twin: LlamaForCausalLM) -> None:
    """Only what comes back from the low-bit tier is what the host has."""
    cache = cache_of(step(twin, prompt(100)))
    window = session_of(cache).state[0]["recent"].clone()  # of W = 64 places tokens 64 to 99, at t mod 64
    cache.crop(-8)
    step(twin, prompt(1), cache)
    session_of(cache).tiers.drain()
    state = in_rows(session_of(cache))[0]
    assert torch.equal(state["recent"][:, :, :28], window[:, :, :28]), "tokens 64 to 91"
    host = decoded(state["host"], torch.float32, 16)
    assert torch.equal(state["recent"][:, :, 32:], host[:, :, 32:64]), "tokens 32 to 63 are in the window again"


@pytest.mark.parametrize(("tokens", "lost"), [(1, 0), (40, 12)])
def test_an_interrupted_step_rounds_only_tokens_that_it_overwrote(
    twin: LlamaForCausalLM, tokens: int, lost: int
) -> None:
    """40 tokens overwrite the places of tokens 36 to 75, of which the window has 64 to 75."""
    cache = cache_of(step(twin, prompt(100)))
    window = session_of(cache).state[0]["recent"][:, :, :36].clone()  # tokens 64 to 99
    with patch.object(Step, "finish", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        step(twin, prompt(tokens), cache)
    same = (session_of(cache).state[0]["recent"][:, :, :36] == window).all(-1).all(-1).all(1)
    assert same[0].tolist() == [False] * lost + [True] * (36 - lost)
