"""SnapKV's selection and attention against a plain reference: one head at a time, Python lists, float64."""

from __future__ import annotations

import math

import pytest
import torch
from eviction_fixture import BATCH, DIM, GROUP, HEADS, Cache, attention, part, tokens
from torch import Tensor

from specache_compile.evaluation.baselines import prompt_eviction
from specache_compile.evaluation.baselines.eviction import drop_from

pytestmark = pytest.mark.pairwise

BUDGET, WINDOW = 26, 6


def plain_choice(queries: Tensor, keys: Tensor, kernel: int, hidden: int) -> list[int]:
    """Return the tokens that one KV head keeps of a prompt; queries [G, n, d], keys [n, d], `hidden` padding tokens."""
    tokens, scores = keys.shape[0], []
    before = tokens - WINDOW
    for query in queries:
        votes = [0.0] * before
        for i in range(before, tokens):
            weights = (keys[hidden : i + 1] @ query[i] / math.sqrt(DIM)).softmax(0).tolist()
            for t in range(hidden, before):
                votes[t] += weights[t - hidden]
        half = kernel // 2
        around = [votes[max(0, t - half) : t + half + 1] for t in range(before)]
        scores.append([max(near) for near in around])
    mean = {t: -math.inf if t < hidden else sum(score[t] for score in scores) / GROUP for t in range(before)}
    best = sorted(mean, key=lambda t: (mean[t], t))[before - (BUDGET - WINDOW) :]
    return [*sorted(best), *range(before, tokens)]


def cache_of(kernel: int = 5) -> Cache:
    return Cache(torch.ops.specache.prompt_attention, 60, ("snapkv", BUDGET, [WINDOW, kernel]))


@pytest.mark.parametrize("padding", [None, (7, 0)], ids=["unpadded", "left padding"])
@pytest.mark.parametrize("kernel", [5, 1])
def test_a_prefill_is_exact_and_keeps_the_pairs_that_its_last_queries_select(
    kernel: int, padding: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_eviction, "BLOCK", 30)  # of queries that attend at a time
    given = q, k, v = tokens(73)
    cache = cache_of(kernel)
    out = cache.step(*given, padding)
    for row in range(BATCH):
        hidden = padding[row] if padding else 0
        real = q[row, :, hidden:], k[row, :, hidden:], v[row, :, hidden:]
        full = torch.nn.functional.scaled_dot_product_attention(*real, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(out[row, :, hidden:], full, atol=1e-5, rtol=1e-5)
        for head in range(HEADS):
            group = slice(head * GROUP, (head + 1) * GROUP)
            expected = plain_choice(q[row, group].double(), k[row, head].double(), kernel, hidden)
            assert cache.kept(row, head) == expected
            assert torch.equal(cache.pairs[row, head, :BUDGET, 0], k[row, head, expected])
            assert torch.equal(cache.pairs[row, head, :BUDGET, 1], v[row, head, expected])


def test_tokens_after_the_prompt_stay_and_a_step_may_be_repeated() -> None:
    given, cache = tokens(80), cache_of()
    cache.step(*part(given, 0, 73))
    chosen = {(row, head): cache.kept(row, head) for row in range(BATCH) for head in range(HEADS)}
    assert len({tuple(kept) for kept in chosen.values()}) == BATCH * HEADS
    for start, stop in ((73, 77), (77, 78), (77, 78), (78, 80)):
        cache.length = start
        out = cache.step(*part(given, start, stop))
        for (row, head), kept in chosen.items():
            for token in range(start, stop):
                expected = attention([*kept, *range(73, token)], row, head, token, given)
                found = out[row, head * GROUP : (head + 1) * GROUP, token - start]
                torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
            assert cache.kept(row, head) == [*kept, *range(73, stop)]


def test_after_a_crop_into_the_prompt_each_head_goes_on_with_what_it_has() -> None:
    """Heads then hold different counts; a crop to length 0 empties the cache."""
    given, cache = tokens(73), cache_of()
    cache.step(*given)
    chosen = {
        (row, head): [t for t in cache.kept(row, head) if t < 40] for row in range(BATCH) for head in range(HEADS)
    }
    assert len({len(kept) for kept in chosen.values()}) > 1
    drop_from(cache.token, 40, cache.pairs)
    cache.length = 40
    out = cache.step(*part(given, 40, 41))
    for (row, head), kept in chosen.items():
        expected = attention(kept, row, head, 40, given)
        torch.testing.assert_close(
            out[row, head * GROUP : (head + 1) * GROUP, 0].double(), expected, atol=1e-5, rtol=1e-5
        )
        assert cache.kept(row, head) == [*kept, 40]
    drop_from(cache.token, 0, cache.pairs)
    cache.length, again = 0, cache_of()
    torch.testing.assert_close(cache.step(*given), again.step(*given))
    assert torch.equal(cache.token, again.token)


@pytest.mark.parametrize("count", [5, BUDGET, BUDGET + 1])
def test_a_prompt_may_exceed_the_budget_before_eviction(count: int) -> None:
    cache = cache_of()
    cache.step(*tokens(count))
    assert len(cache.kept(0, 0)) == min(count, BUDGET)
