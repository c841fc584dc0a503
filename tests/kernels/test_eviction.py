"""Eviction policies against a plain reference from the formulas: one head at a time, Python lists, float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from decode_step import output, reference
from eviction_fixture import BATCH, DIM, GROUP, HEADS, Cache, attention, part, tokens
from torch import Tensor

from specache_compile.evaluation.baselines import eviction as evict
from specache_compile.evaluation.baselines.eviction import WHOLE, drop_from
from specache_compile.evaluation.baselines.policies import POLICIES

pytestmark = pytest.mark.pairwise

POLICY_NAMES = tuple(name for name in POLICIES if name != "random")


@dataclass
class Pair:
    """A kept pair and its attention in each step, averaged over the query group."""

    token: int
    key: Tensor
    value: Tensor
    received: list[float] = field(default_factory=list)
    above: int = 0


@dataclass
class PlainHead:
    """One KV head under a budget."""

    policy: str
    budget: int
    pairs: list[Pair] = field(default_factory=list)

    def encode(self, queries: Tensor, keys: Tensor, values: Tensor, first: int, hidden: set[int]) -> Tensor:
        """Add new tokens with queries [T, G, d], keys and values [T, d]; returns their outputs [T, G, d]."""
        for i, (key, value) in enumerate(zip(keys, values, strict=True)):
            self.pairs.append(Pair(first + i, key, value))
        return torch.stack([self.attend(query, first + i, hidden) for i, query in enumerate(queries)])

    def attend(self, query: Tensor, token: int, hidden: set[int]) -> Tensor:
        seen = [pair for pair in self.pairs if pair.token <= token and pair.token not in hidden]
        if not seen:
            return torch.zeros_like(query)
        keys, values = torch.stack([p.key for p in seen]), torch.stack([p.value for p in seen])
        weights = (query @ keys.T / math.sqrt(DIM)).softmax(-1)  # [G, n]
        mean = weights.mean(0).tolist()
        for pair, share in zip(seen, mean, strict=True):
            pair.received.append(share)
            pair.above += share > sum(mean) / len(mean)
        return weights @ values

    def evict(self, hidden: set[int], importance: dict[int, float]) -> None:
        """Evict hidden pairs first, then the least important; the oldest first among equals."""
        drop = len(self.pairs) - self.budget
        if drop <= 0:
            return
        worth = {**importance, **dict.fromkeys(hidden, -math.inf)}
        order = sorted(self.pairs, key=lambda p: (worth[p.token], p.token))
        gone = {pair.token for pair in order[:drop]}
        self.pairs = [pair for pair in self.pairs if pair.token not in gone]

    def importance(self, hidden: set[int]) -> dict[int, float]:
        newest = max(pair.token for pair in self.pairs)
        window = {pair.token for pair in self.pairs if newest - pair.token < self.budget // 2}
        mean = {p.token: sum(p.received) / max(1, len(p.received)) for p in self.pairs}
        if self.policy == "streaming_llm":
            return {p.token: math.inf if p.token < len(hidden) + 4 else p.token for p in self.pairs}
        if self.policy == "scissorhands":
            return {p.token: math.inf if p.token in window else p.above for p in self.pairs}
        if self.policy == "h2o":
            return {p.token: math.inf if p.token in window else sum(p.received) for p in self.pairs}
        if self.policy == "tova":
            return {p.token: p.received[-1] if p.received else 0.0 for p in self.pairs}
        assert self.policy == "roco"
        deviation = {
            p.token: math.inf
            if newest - p.token < 10
            else math.sqrt(sum((a - mean[p.token]) ** 2 for a in p.received) / max(1, len(p.received)))
            for p in self.pairs
        }
        protected = sorted(deviation, key=lambda t: (-deviation[t], -t))[: self.budget // 2]
        return {token: math.inf if token in protected else mean[token] for token in mean}


def plain(policy: str, q: Tensor, k: Tensor, v: Tensor, budget: int, steps: list[int], padding: list[int]) -> Any:
    """Return outputs [B, Hq, T, d], and for each (row, head) the kept tokens after each step of `steps` tokens."""
    out: Tensor = torch.zeros_like(q)
    kept: dict[tuple[int, int], list[list[int]]] = {(row, head): [] for row in range(BATCH) for head in range(HEADS)}
    for row in range(BATCH):
        hidden, start = set(range(padding[row])), 0
        heads = [PlainHead(policy, budget) for _ in range(HEADS)]
        for count in steps:
            new = slice(start, start + count)
            for head, one in enumerate(heads):
                group = slice(head * GROUP, (head + 1) * GROUP)
                queries = q[row, group, new].transpose(0, 1)
                result = one.encode(queries, k[row, head, new], v[row, head, new], start, hidden)
                out[row, group, new] = result.transpose(0, 1)
            importance = [one.importance(hidden) for one in heads]
            if policy == "tova":  # all heads of a layer drop the same
                mean = {token: sum(each[token] for each in importance) / HEADS for token in importance[0]}
                importance = [mean] * HEADS
            for head, one in enumerate(heads):
                one.evict(hidden, importance[head])
                kept[row, head].append([pair.token for pair in one.pairs])
            start += count
    return out, kept


def cache_of(budget: int, policy: str, block: int = 1, seed: int = 0) -> Cache:
    history = torch.zeros(BATCH, HEADS, budget, 4)
    return Cache(torch.ops.specache.budget_attention, budget, (policy, block, seed), history)


def doubles(*given: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.double() for x in given)


def blocks(count: int, budget: int, block: int) -> list[int]:
    """Return the steps of a prompt: the tokens that fit at once, then blocks."""
    sizes = [min(count, budget)]
    while sum(sizes) < count:
        sizes.append(min(block, count - sum(sizes)))
    return sizes


@pytest.mark.parametrize("padding", [None, [35, 0]], ids=["unpadded", "left padding"])
@pytest.mark.parametrize("block", [1, 5, WHOLE])
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_prompt_is_evicted_block_by_block(
    policy: str, block: int, padding: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or once, after the whole prompt, whose attention is then the full attention."""
    monkeypatch.setattr(evict, "ROWS", 30)  # of queries that attend at a time
    q, k, v = tokens(73, seed=1)
    cache = cache_of(26, policy, block)
    out = cache.step(q, k, v, padding)
    expected, kept = plain(policy, *doubles(q, k, v), 26, blocks(73, 26, block or 73), padding or [0, 0])
    if block == WHOLE and padding is None:
        full = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(out, full, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    for row, head in kept:
        assert cache.kept(row, head) == kept[row, head][-1]
        assert torch.equal(cache.pairs[row, head, :, 0], k[row, head, kept[row, head][-1]])
        assert torch.equal(cache.pairs[row, head, :, 1], v[row, head, kept[row, head][-1]])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_in_pieces_ends_as_one_in_whole(policy: str) -> None:
    """A prefill, a chunk and decode steps; with blocks of one token, the cuts make no difference."""
    q, k, v = tokens(30, seed=2)
    whole, pieces = cache_of(9, policy), cache_of(9, policy)
    out = whole.step(q, k, v)
    parts = [pieces.step(*part((q, k, v), a, b)) for a, b in ((0, 4), (4, 17), (17, 18), (18, 30))]
    torch.testing.assert_close(torch.cat(parts, 2), out)
    assert torch.equal(pieces.token, whole.token)
    torch.testing.assert_close(pieces.state[0], whole.state[0])


def test_a_sink_takes_its_share() -> None:
    """A sink is a logit of each head without a pair (gpt-oss)."""
    q, k, v = tokens(40, seed=6)
    sinks = torch.linspace(-2, 6, HEADS * GROUP)
    out = cache_of(10, "h2o", WHOLE).step(q, k, v, sinks=sinks)
    expected = output(reference(q, k, None, torch.ones(40, 40).tril().bool(), sinks, None), v)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_head_that_sees_nothing_where_its_group_does_gives_zero() -> None:
    q, k, v = tokens(20, seed=7)
    causal = torch.ones(20, 20).tril().bool()
    seen = causal.expand(BATCH, HEADS * GROUP, 20, 20).clone()
    seen[:, 1, 12] = False
    cache = cache_of(10, "h2o", WHOLE)
    out, weights = cache.step(q, k, v, mask=seen), reference(q, k, seen, causal, None, None)
    torch.testing.assert_close(out.double(), output(weights, v), atol=1e-5, rtol=1e-5)
    assert not out[:, 1, 12].any()
    received = weights.unflatten(1, (HEADS, GROUP)).mean(2).sum(2)
    for row, head in ((r, h) for r in range(BATCH) for h in range(HEADS)):
        expected = received[row, head, cache.kept(row, head)]
        torch.testing.assert_close(cache.state[0][row, head, :, 0].double(), expected, atol=1e-5, rtol=1e-5)


def test_random_eviction_follows_its_seed() -> None:
    q, k, v = tokens(60, seed=4)
    caches = [cache_of(20, "random", seed=seed) for seed in (0, 0, 1)]
    for cache in caches:
        cache.step(q, k, v)
    assert torch.equal(caches[0].token, caches[1].token)
    assert not torch.equal(caches[0].token, caches[2].token)
    assert len({tuple(cache.kept(0, head)) for cache in caches[:1] for head in range(HEADS)}) == HEADS


def test_the_cache_continues_after_dropping_more_than_it_had() -> None:
    """Heads then hold different counts; empty entries get no attention, and are filled before any eviction."""
    first, more = tokens(30, seed=7), tokens(3, seed=8)
    given = tuple(torch.cat([x[:, :, :15], y], 2) for x, y in zip(first, more, strict=True))
    cache = cache_of(10, "tova")
    cache.step(*first)
    drop_from(cache.token, 15, cache.pairs, cache.state[0])
    cache.length = 15
    for token in range(15, 18):
        old = {(r, h): cache.kept(r, h) for r in range(BATCH) for h in range(HEADS)}
        out = cache.step(*part(given, token, token + 1))
        for (row, head), kept in old.items():
            found = out[row, head * GROUP : (head + 1) * GROUP, 0]
            torch.testing.assert_close(found.double(), attention(kept, row, head, token, given), atol=1e-5, rtol=1e-5)
            if len(kept) < 10:
                assert cache.kept(row, head) == [*kept, token]
