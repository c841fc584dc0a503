"""Rows that draft (option verify) generate what each generates one token a step, whatever rows are beside them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from test_batch import Failing, all_free
from transformers import DynamicCache, LlamaForCausalLM, LogitsProcessorList

import specache_compile as sc
from conftest import compiled_with, greedy, new_tokens, prompt, tiny_llama
from families import BY_NAME
from specache_compile.batching.request import End, Request
from specache_compile.errors import SpecacheWarning
from specache_compile.generate import verify
from specache_compile.kernels.state.page_table import PAGE

pytestmark = pytest.mark.one_process

CHUNK = 128
# One drafted token in four is right, or so.
VERIFY = {"lowering": "eager", "bits": 1, "group_size": 32, "residual_length": 32, "top_k": 8, "verify": 4}
# Of each request its prompt's length and what it asks for. The first's draft crosses a page.
ASKED: list[tuple[int, dict[str, Any]]] = [
    (PAGE - 6, {"max_new_tokens": 22}),
    (7, {"max_new_tokens": 30, "repetition_penalty": 1.2}),
    (90, {"max_new_tokens": 25, "eos_token_id": list(range(0, 128, 9)), "min_new_tokens": 4, "pad_token_id": 0}),
    (40, {"max_new_tokens": 2}),
]


@pytest.fixture(scope="module")
def plain() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def verifying(plain: LlamaForCausalLM) -> Any:
    return compiled_with(plain, VERIFY)


def test_rows_that_come_and_go_say_the_uncompiled_models_tokens(plain: LlamaForCausalLM, verifying: Any) -> None:
    batch, chance = sc.Batch(verifying, chunk=CHUNK), random.Random(2)
    removed = batch.add(prompt(30, seed=50), max_new_tokens=200)
    requests, reported = list[Request](), dict[Request, list[int]]()
    together = 0
    while batch.open or len(requests) < len(ASKED):
        if len(requests) < len(ASKED) and chance.random() < 0.6:
            length, requested = ASKED[len(requests)]
            requests.append(batch.add(prompt(length, seed=length), **requested))
        for request, token in batch.step():
            reported.setdefault(request, []).append(token)
        together = max(together, len(batch.decoding))
        if len(removed.generated) > 24:
            batch.remove(removed)
    assert together > 2
    for request, (length, requested) in zip(requests, ASKED, strict=True):
        alone = plain.generate(prompt(length, seed=length), do_sample=False, **requested)[0, length:].tolist()
        assert request.generated == reported[request] == alone
    verification = sc.stats(batch.model).verification
    assert verification is not None
    assert 0 < verification.acceptance < 1
    assert all_free(batch)


def test_a_seed_draws_what_it_draws_without_drafts(plain: LlamaForCausalLM, verifying: Any) -> None:
    """With the same random numbers, a sampled draft is accepted about as often as a greedy one; log-probabilities come
    from the exact pass."""
    requested = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.8, "top_k": 20, "logprobs": 1}
    made = []
    for model in (compiled_with(plain, {"method": "offload", "lowering": "eager"}), verifying):
        batch = sc.Batch(model, chunk=CHUNK)
        made.append([batch.add(prompt(60, seed=seed), seed=seed, **requested) for seed in (1, 2)])
        batch.run()
    for exact, drafted in zip(*made, strict=True):
        assert drafted.generated == exact.generated
        assert [one.chosen for one in drafted.logprobs] == pytest.approx(
            [one.chosen for one in exact.logprobs], abs=1e-4
        )
    verification = sc.stats(verifying).verification
    assert verification is not None
    assert verification.acceptance > 0.1


@torch.no_grad()
def test_a_draft_writes_no_page_that_others_have(plain: LlamaForCausalLM, verifying: Any) -> None:
    """Two continue a part of a session, up to within a page; the session stays as it was."""
    batch = sc.Batch(verifying, chunk=CHUNK, sessions=3)
    first = batch.add(prompt(PAGE + 40, seed=8), max_new_tokens=3)
    batch.run()
    (prefix,) = batch.memory.prefixes.kept
    cache: Any = prefix.cache
    kept = [(layer.keys.clone(), layer.values.clone()) for layer in sc.materialize(cache).layers]
    ids = [torch.cat([first.ids[0, : PAGE + 30], prompt(9, seed=seed)[0]]) for seed in (1, 2)]
    requests = [batch.add(one, max_new_tokens=12) for one in ids]
    batch.run()
    assert [request.reused for request in requests] == [PAGE + 30] * 2
    for request in requests:
        assert request.generated == new_tokens(plain, request.prompt[None], 12)
    for layer, (keys, values) in zip(sc.materialize(cache).layers, kept, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)
    del prefix, cache, layer
    assert all_free(batch)


def test_a_processor_that_fails_within_a_draft_ends_its_request_where_it_would_without(
    verifying: Any, plain: Any
) -> None:
    batch = sc.Batch(verifying, chunk=CHUNK)
    good = batch.add(prompt(40), max_new_tokens=8)
    bad = batch.add(prompt(30), max_new_tokens=20, logits_processor=LogitsProcessorList([Failing(37)]))
    batch.run()
    assert (bad.end, str(bad.error)) == (End.FAILED, "no token is good enough")
    assert bad.generated == new_tokens(plain, prompt(30), 7)
    assert good.generated == new_tokens(plain, prompt(40), 8)
    assert all_free(batch)


@pytest.mark.slow
def test_a_processor_that_fails_beside_rows_that_cannot_draft_ends_its_request_alone() -> None:
    """A recurrence drops no tokens; the failed row leaves with a cached token that it never generated."""
    hybrid = BY_NAME["qwen3_5_text"].model()
    batch = sc.Batch(compiled_with(hybrid, VERIFY), chunk=CHUNK)
    failing = LogitsProcessorList([Failing(40 + 3)])
    first = batch.add(prompt(40, seed=1), max_new_tokens=9, logits_processor=failing)
    second = batch.add(prompt(60, seed=2), max_new_tokens=9)
    with pytest.warns(SpecacheWarning, match="not drafted"):
        batch.run()
    assert (first.end, len(first.generated)) == (End.FAILED, 3)
    assert second.end is End.LENGTH
    assert torch.equal(second.ids, greedy(hybrid, prompt(60, seed=2), 9))


@pytest.mark.parametrize("call", [1, 4], ids=["in a draft", "before a verification"])
def test_a_round_that_fails_half_way_can_be_taken_again(
    verifying: Any, plain: Any, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = sc.Batch(verifying, chunk=CHUNK)
    requests = [batch.add(prompt(length, seed=length), max_new_tokens=9) for length in (20, 50)]
    while len(batch.decoding) < 2:
        batch.step()
    ask, calls = batch.call_model, iter(range(100))

    def fail(*given: Any) -> Any:
        if next(calls) == call:
            raise RuntimeError("planted")
        return ask(*given)

    with monkeypatch.context() as patch:
        patch.setattr(batch, "call_model", fail)
        with pytest.raises(RuntimeError, match="planted"):
            batch.step()
    batch.run()
    for length, request in zip((20, 50), requests, strict=True):
        assert request.generated == new_tokens(plain, prompt(length, seed=length), 9)


def test_windows_that_cannot_take_back_drafts_are_refused_before_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of transformers 5.17."""
    monkeypatch.setattr(verify, "WINDOWS_TAKE_DRAFTS", False)
    model = compiled_with(BY_NAME["gemma2"].model(), VERIFY)
    with pytest.raises(sc.SpecacheError, match=r"Install transformers 5\.18 or newer"):
        sc.Batch(model)
    reason = verify.forgetful(model, DynamicCache(config=model.config))
    assert reason is not None
    assert "a DynamicSlidingWindowLayer cannot drop rejected tokens" in reason
