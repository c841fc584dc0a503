"""A context too short to gain stays in 16 bits, and moves over when it has grown (option `min_context`)."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaForCausalLM

import specache_compile as sc
from conftest import LOSSLESS, compile_copy, failing, greedy, prompt, step, tiny_llama
from held_tiers import in_rows
from specache_compile.compat import cache_of
from specache_compile.runtime.session import session_of
from specache_compile.runtime.tiers import Tiers

pytestmark = [pytest.mark.one_process, pytest.mark.one_trace]

LEAST = 110


def test_below_it_every_pair_is_on_the_device_in_16_bits_and_nothing_is_fetched(llama: LlamaForCausalLM) -> None:
    twin = compile_copy(llama, bits=1, top_k=4, min_context=LEAST)
    assert torch.equal(greedy(twin, prompt(79, 2), 30), greedy(llama, prompt(79, 2), 30))
    stats = sc.stats(twin)
    assert (stats.bytes_to_device, stats.pre_decodes, stats.bytes_by_tier["slots"]) == (0, 0, 0)
    assert stats.kv_ratio >= 1


def test_tokens_stay_the_uncompiled_models_while_a_lossless_cache_moves_over(llama: LlamaForCausalLM) -> None:
    """On the way, and until a group has left the window: at 128 tokens."""
    twin = compile_copy(llama, min_context=LEAST)
    assert torch.equal(greedy(twin, prompt(90, 2), 50), greedy(llama, prompt(90, 2), 50))
    stats = sc.stats(twin)
    assert stats.pre_decodes == 1
    assert stats.bytes_to_device > 0


@pytest.mark.parametrize(
    ("biased", "options"),
    [
        (False, {"setting": "paper", "bits": 2, "top_k": 16, "sink_tokens": 4}),
        (False, {"bits": 1}),
        (False, {"bits": 1, "center": "always"}),
        (True, {}),
    ],
    ids=["paper", "keys in a trellis", "centered, in a trellis", "biased"],
)
def test_the_tiers_moved_over_to_are_those_of_a_session_that_started_there(
    biased: bool, options: dict[str, Any]
) -> None:
    """Same tokens cached, 16 bits first or not: the same codes, window, host tier and center of the keys."""
    model, ids, low_bit = tiny_llama(attention_bias=biased), prompt(333, 2), 288  # of 333 tokens at R 32, g 32
    states = []
    for least in (330, 0):
        twin = compile_copy(model, **{"setting": "best", "host_bits": 16, **options, "min_context": least})
        cache = cache_of(step(twin, ids[:, :300]))
        assert (session_of(cache).options.bits == 16) == (least > 0)
        cache = cache_of(step(twin, ids[:, 300:], cache))
        assert session_of(cache).tiers.pending is None
        states.append(in_rows(session_of(cache)))
    for moved, born in zip(*states, strict=True):
        assert moved["sink_index"].tolist() == born["sink_index"].tolist() == [[[0, 1, 2, 3]]] * 2
        assert torch.equal(moved["codes"][:, :, :low_bit], born["codes"][:, :, :low_bit])
        ends = {"host": 333, "key_params": low_bit // 32, "value_params": low_bit, "recent": 64, "sink_pairs": 4}
        for name, end in ends.items():
            torch.testing.assert_close(moved[name][:, :, :end], born[name][:, :, :end], atol=1e-5, rtol=1e-5)
        if options.get("setting") != "paper":
            assert moved["center"][:, :, 2].any(), "it turns"
            torch.testing.assert_close(moved["center"], born["center"], atol=1e-5, rtol=1e-5)


def test_a_move_that_was_interrupted_goes_on_with_the_next_step(llama: LlamaForCausalLM) -> None:
    twin, ids = compile_copy(llama, min_context=LEAST), prompt(120, 2)
    cache = cache_of(step(twin, ids[:, :100]))
    interrupted = failing(Tiers.all_pairs, KeyboardInterrupt, call=2)
    with patch.object(Tiers, "all_pairs", interrupted), pytest.raises(KeyboardInterrupt):
        step(twin, ids[:, 100:], cache)
    again = step(twin, ids[:, 100:], cache)
    assert session_of(cache).options.bits == LOSSLESS["bits"]
    ours = [again.logits[:, -1:], step(twin, ids[:, :1], cache).logits]
    full = step(llama, torch.cat([ids, ids[:, :1]], 1)).logits[:, -2:]
    torch.testing.assert_close(torch.cat(ours, 1), full, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_explain_shows_what_holds_at_the_prompts_length(llama: LlamaForCausalLM) -> None:
    options = {**LOSSLESS, "min_context": 1000}
    assert sc.explain(llama, 999, 1, options).bytes_by_tier["slots"] == 0
    assert sc.explain(llama, 1000, 1, options).bytes_by_tier["slots"] > 0


def test_tokens_after_a_hole_that_a_later_call_no_longer_hides_are_compressed_as_others(
    llama: LlamaForCausalLM,
) -> None:
    """Without a mask all tokens are visible: the range of a group includes the newest."""
    ids, mask = prompt(260), torch.ones(1, 100, dtype=torch.int64)
    mask[0, 40:50] = 0
    states = []
    for least in (0, 200):
        twin = compile_copy(llama, bits=2, top_k=0, min_context=least, host_bits=16)
        cache = cache_of(step(twin, ids[:, :100], attention_mask=mask))
        for begin, end in ((100, 180), (180, 260)):
            cache = cache_of(step(twin, ids[:, begin:end], cache))
        session_of(cache).tiers.drain()
        states.append(in_rows(session_of(cache)))
    for one, other in zip(*states, strict=True):
        assert torch.equal(one["codes"][:, :, 96:128], other["codes"][:, :, 96:128])
