"""Methods through a whole model: the full cache where they should be, what each keeps, and what it refuses."""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

import specache_compile as sc
from conftest import compiled_with, failing, greedy, prompt, step, tiny_llama
from held_tiers import adjacent, cursor_over
from specache_compile.compat import cache_of
from specache_compile.evaluation.baselines import eviction as evict
from specache_compile.explaining.times.step_kernels import is_captured
from specache_compile.kernels.state.page_table import PAGE
from specache_compile.lowering.cuda_graphs import reason_not_to_capture
from specache_compile.methods import every_method, parse_options
from specache_compile.runtime.records import find_record
from specache_compile.runtime.session import session_of
from step_order import check_order, schedule_of

pytestmark = [pytest.mark.one_process, pytest.mark.one_trace]

EVICTION = ("random", "streaming_llm", "scissorhands", "h2o", "tova", "roco")
# Settings in which it shows; test_lossless.py has those in which it does not.
LOSSY: dict[str, dict[str, Any]] = {
    "full": {},
    "offload": {},
    "fp8": {},
    "kivi": {"bits": 1},
    "specache": {"bits": 1, "top_k": 8, "host_bits": 16},
    "pages": {"bits": 1, "top_k": 16, "host_bits": 16},
    "kcache": {"top_n": 8},
    "snapkv": {"budget": 24, "window": 8},
    "expected_attention": {"budget": 24},
    "kvzip": {"budget": 4096},  # fewer take a second reading: test_kvzip.py
    **{name: {"budget": 24} for name in EVICTION},
}
# One method of each recipe.
RECIPES = ("full", "fp8", "offload", "kcache", "snapkv", "roco")

each_method = pytest.mark.parametrize("method", every_method())
# What a method keeps and where: the policies differ in which pairs go, which test_eviction.py asks.
KINDS = [name for name in every_method() if name not in EVICTION or name == "roco"]
every_kind = pytest.mark.parametrize("method", KINDS)


def under(model: LlamaForCausalLM, method: str, **options: Any) -> LlamaForCausalLM:
    """The model compiled in place with a method, op by op unless the options set another lowering."""
    return compiled_with(model, {"lowering": "eager", "method": method, **options})


@functools.cache
def explained(method: str) -> Any:
    """Of two prompts of 300 tokens, in the settings in which a method shows."""
    return sc.explain(tiny_llama(), 300, 2, {"method": method, **LOSSY[method]})


def state_of(cache: Any) -> Any:
    return session_of(cache).state


# What a method keeps


@pytest.mark.parametrize("method", ["streaming_llm", "roco"])  # without a history, and with all of it
def test_a_step_attends_to_the_kept_pairs_and_itself(method: str) -> None:
    """One layer, whose keys no attention has touched: the uncompiled model under a mask of the kept tokens of each
    head is an independent reference."""
    model = tiny_llama(num_hidden_layers=1, attn_implementation="eager")
    ours, budget, ids = under(model, method, budget=24), 24, prompt(80)
    cache, full = DynamicCache(), DynamicCache()
    step(ours, ids[:, :60], cache)
    step(model, ids[:, :60], full)
    for t in range(60, 80):
        kept = state_of(cache)[0]["kept_token"].clone()
        assert kept.shape == (1, 2, budget)
        mask = torch.full((1, 2, t + 1), torch.finfo(torch.float32).min)
        mask.scatter_(2, kept.long(), 0.0)[:, :, t] = 0.0
        token = ids[:, t : t + 1]
        mine = step(ours, token, cache).logits
        per_head = mask.repeat_interleave(2, 1).unsqueeze(2)
        theirs = step(model, token, full, attention_mask=per_head, position_ids=torch.tensor([[t]])).logits
        torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("rate", [0.255, 1.0])
def test_a_rate_is_of_the_prompt_and_stays(rate: float) -> None:
    """And the first step runs the graph that was compiled ahead."""
    cache, twin = DynamicCache(), under(tiny_llama(), "h2o", budget=rate)
    step(twin, prompt(100), cache)
    step(twin, prompt(1), cache)
    assert sc.stats(twin).compiles == 2
    for _ in range(4):
        step(twin, prompt(1), cache)
    assert all(layer["kept"].shape[2] == math.ceil(rate * 100) for layer in state_of(cache))


@pytest.mark.quick_for("specache", "kcache", "roco")
@every_kind
def test_a_prompt_of_another_length_compiles_nothing_new(llama: LlamaForCausalLM, method: str) -> None:
    """Once Dynamo has made lengths dynamic, which takes it two prompts."""
    twin, compiles = under(llama, method, **LOSSY[method]), []
    for length in (100, 104, 108, 112):
        cache = cache_of(step(twin, prompt(length, batch=2)))
        step(twin, prompt(1, batch=2), cache)
        compiles.append(sc.stats(twin).compiles)
    assert compiles[1] == compiles[2] == compiles[3]


def test_a_crop_under_eviction_drops_the_newer_pairs(llama: LlamaForCausalLM) -> None:
    cache, twin = DynamicCache(), under(llama, "h2o", budget=24)
    step(twin, prompt(80), cache)
    before = [layer["kept_token"].clone() for layer in state_of(cache)]
    cache.crop(-10)
    step(twin, prompt(1), cache)
    for old, layer in zip(before, state_of(cache), strict=True):
        for head in range(2):
            stays = [token for token in old[0, head].tolist() if token < 70]
            assert [token for token in layer["kept_token"][0, head].tolist() if token >= 0] == [*stays, 70]


def test_a_step_that_stopped_half_way_had_evicted_and_cannot_be_taken_again(llama: LlamaForCausalLM) -> None:
    """Interrupted at the second layer."""
    twin = under(llama, "h2o", budget=24)
    cache = cache_of(step(twin, prompt(80)))
    step(twin, prompt(1), cache)
    before = copy.deepcopy(cache)
    interrupted = failing(evict.received, KeyboardInterrupt, call=2)
    with patch.object(evict, "received", interrupted), pytest.raises(KeyboardInterrupt):
        step(twin, prompt(1), cache)
    with pytest.raises(sc.SpecacheError, match=r"method 'h2o' had started to drop pairs .*"):
        step(twin, prompt(1), cache)
    assert cache_of(step(twin, prompt(1), before)).get_seq_length() == 82


# FP8, KCache and KIVI


def test_fp8_attends_over_a_cache_that_was_rounded(llama: LlamaForCausalLM) -> None:
    """As the uncompiled model does, whose own cache is rounded to e4m3 behind every step."""
    twin, ids = under(llama, "fp8"), prompt(71, batch=2)
    ours, theirs = DynamicCache(), DynamicCache()
    for start, stop in ((0, 60), (60, 61), (61, 70), (70, 71)):
        mine, right = (step(m, ids[:, start:stop], cache).logits for m, cache in ((twin, ours), (llama, theirs)))
        torch.testing.assert_close(mine, right, atol=1e-3, rtol=1e-3)
        for layer in theirs.layers:
            layer.keys, layer.values = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (layer.keys, layer.values))
    assert sc.stats(twin).bytes_by_tier == {"host": 0, "cache": 2 * 2 * 2 * 256 * 2 * 16}
    for a, b in zip(sc.materialize(ours).layers, theirs.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, atol=1e-4, rtol=0.13)  # a code's neighbour is an eighth away


@pytest.mark.parametrize("top_n", [1, 7, 61])
@pytest.mark.parametrize("length", [0, 60])
def test_kcache_sums_the_n_heaviest_values_of_each_query_head(top_n: int, length: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 1, 8), torch.randn(2, 2, 1, 8)
    keys, host = torch.randn(2, 2, PAGE, 8), torch.randn(2, 2, PAGE, 2, 8)
    cursor = cursor_over(adjacent(2, PAGE), length)
    out = torch.ops.specache.kcache_attention(q, k, v, None, None, cursor, keys, host, top_n, 0.5, None)
    for row in range(2):
        for head in range(4):
            pair = row, head // 2
            all_keys = torch.cat([keys[pair][:length], k[pair]]).double()
            all_values = torch.cat([host[pair][:length, 1], v[pair]]).double()
            weights = (all_keys @ q[row, head, 0].double() * 0.5).softmax(0)
            heaviest = sorted(range(length + 1), key=lambda i: -float(weights[i]))[:top_n]
            expected = sum(weights[i] * all_values[i] for i in heaviest)
            torch.testing.assert_close(out[row, head, 0].double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_kcache_keeps_the_values_of_its_first_layers_on_the_device(llama: LlamaForCausalLM, kept: int) -> None:
    cache = cache_of(step(under(llama, "kcache", kept_layers=kept), prompt(80)))
    assert ["full_cache" in layer for layer in state_of(cache)] == [n < kept for n in range(2)]
    assert ["host" in layer for layer in state_of(cache)] == [n >= kept for n in range(2)]


def test_kivi_is_specache_that_fetches_nothing(llama: LlamaForCausalLM) -> None:
    ids, settings = prompt(300), {"bits": 1, "group_size": 32}
    ours = under(llama, "kivi", **settings)
    same = under(llama, "specache", setting="paper", **settings, top_k=0, residual_length=128)
    assert torch.equal(greedy(ours, ids, 24), greedy(same, ids, 24))
    for model in (ours, same):
        record = find_record(model)
        assert (sc.stats(model).pre_decodes, sc.stats(model).bytes_to_device) == (0, 0)
        assert {graph.captured.phase.name for graph in record.graphs} == {"prefill", "decode"}
        assert all(form.lanes == 1 for graph in record.graphs for form in graph.rewrites.made.values())


# Options


@pytest.mark.parametrize(("rate", "tokens", "pairs"), [(0.07, 100, 7), (0.55, 100, 55), (0.071, 100, 8), (1e-9, 5, 1)])
def test_a_rate_rounds_up_but_not_by_a_rounding_error(rate: float, tokens: int, pairs: int) -> None:
    assert parse_options({"method": "roco", "budget": rate}).for_prompt(tokens).budget == pairs


@each_method
def test_a_method_takes_every_option_that_it_lists(method: str) -> None:
    defaults = vars(parse_options({"method": method}))
    parse_options({name: defaults[name] for name in every_method()[method].accepted})


# What is said of it


@pytest.mark.quick_for("specache", "snapkv")
@every_kind
def test_what_explain_predicts_is_what_is_allocated_and_no_access_is_unordered(
    llama: LlamaForCausalLM, method: str
) -> None:
    e, twin = explained(method), under(llama, method, **LOSSY[method])
    step(twin, prompt(1, batch=2), cache_of(step(twin, prompt(300, batch=2))))
    live = sc.stats(twin)
    assert live.bytes_by_tier == e.bytes_by_tier
    assert live.device_bytes + live.host_bytes == sum(e.bytes_by_tier.values())
    assert check_order(schedule_of(e.graphs["decode"])) == []
    assert f"method {method}: " in str(e)
    assert "2 of 2 attentions rewritten" in str(e)


@pytest.mark.quick_for("specache", "kcache")
@every_kind
def test_only_what_goes_to_the_host_is_counted_as_going_there(llama: LlamaForCausalLM, method: str) -> None:
    """By the statistics of a run, and by explain's traffic of a step."""
    twin = under(llama, method, **LOSSY[method])
    step(twin, prompt(1, batch=2), cache_of(step(twin, prompt(100, batch=2))))
    layers = {**dict.fromkeys(("full", "fp8", "snapkv", "expected_attention", "kvzip", *EVICTION), 0), "kcache": 1}.get(
        method, 2
    )
    token = 2 * 2 * 2 * 16 * 4  # of two rows
    assert sc.stats(twin).bytes_to_host == layers * 101 * token
    e = explained(method)
    assert not e.is_timed or sum(span.kernel.to_host for span in e.spans) == layers * token


@pytest.mark.quick_for("full", "kcache")
@pytest.mark.parametrize("method", [method for method in RECIPES if method != "fp8"])
def test_a_step_that_reads_lengths_on_the_host_is_not_captured(method: str) -> None:
    graph = explained(method).graph("decode")
    plan = type("Plan", (), {})
    assert "reads the cache's length on the host" in (reason_not_to_capture(graph, plan) or "")


def test_no_op_of_an_fp8_step_reads_lengths_on_the_host() -> None:
    assert is_captured(explained("fp8").graph("decode"))


def test_the_docs_name_every_method() -> None:
    text = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    assert [name for name in every_method() if f"`{name}`" not in text] == []
