"""Rows of held caches join and leave; each generates the same as alone, with lossy settings too."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import specache_compile as sc
from conftest import LOSSLESS, compiled_with, prompt, step, tiny_llama
from held_tiers import in_rows
from specache_compile.caches.joining import append_rows, drop, in_pages, keep_rows, reserve_cache_rows
from specache_compile.compat import cache_of, with_cache
from specache_compile.errors import SpecacheError
from specache_compile.paging.pool import PagePool, batch_pool
from specache_compile.runtime.session import required_session

pytestmark = pytest.mark.one_process

SMALL = {"lowering": "eager", "group_size": 32, "residual_length": 32, "top_k": 8}
# Only the speculative lane selects pairs, so a new row needs a pre-decode, and no correction hides its effect.
SETTINGS = {
    "lossless": LOSSLESS,
    "default": SMALL,
    "keys in a trellis": {**SMALL, "bits": 1},
    "paper": {**SMALL, "setting": "paper", "bits": 1},
    "paper, one lane": {**SMALL, "setting": "paper", "bits": 1, "speculate": False},
    "kivi": {**SMALL, "method": "kivi", "bits": 2},
    "offload": {"lowering": "eager", "method": "offload"},
    "full": {"lowering": "eager", "method": "full"},
    "default, fused": {**SMALL, "lowering": "inductor"},
}
del SETTINGS["kivi"]["top_k"]
# One layer, one head, a small vocabulary: these tests do not depend on the model.
TINIEST = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1,
}  # fmt: skip
LONG, SHORT, MIDDLE = 190, 9, 70


@torch.no_grad()
def forward(model: Any, cache: DynamicCache | None, tokens: Tensor) -> tuple[DynamicCache, Tensor]:
    """Return the cache, and each row's last logits, after new tokens [B, T]."""
    past = torch.zeros(tokens.shape[0], dtype=torch.int64) if cache is None else sc.lengths(cache)
    positions = past[:, None] + torch.arange(tokens.shape[1])
    out = model(tokens, **with_cache(cache), position_ids=positions, use_cache=True)
    return cache_of(out), out.logits[:, -1]


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.quick_for("default")
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_random_walk_of_rows_equals_each_row_alone(setting: str) -> None:
    """Joins, leaves, crops and steps of one or several tokens; each row has a twin that runs alone. Rows are appended
    within one pool; the last one is joined with them in a new pool."""
    model, chance = compiled(setting), random.Random(3)
    pool: PagePool | None = None
    apart: list[DynamicCache] = []
    together: DynamicCache | None = None
    latest: Tensor | None = None
    for turn, length in enumerate((LONG, SHORT, MIDDLE, 96)):
        ids = prompt(length, seed=turn)
        (twin, last), (newcomer, _) = forward(model, None, ids), forward(model, None, ids)
        for _ in range(turn):  # new rows with and without a speculative token
            step = last.argmax(-1, keepdim=True)
            (twin, last), (newcomer, _) = forward(model, twin, step), forward(model, newcomer, step)
        apart.append(twin)
        if turn == 3:
            together = sc.join([together, newcomer])
        else:
            pool = pool or pool_of(newcomer)
            newcomer = in_pages(newcomer, pool)
            together = newcomer if together is None else append_rows(together, newcomer)
        latest = last if latest is None else torch.cat([latest, last])
        for _ in range(chance.randint(3, 6)):
            tokens = latest.argmax(-1, keepdim=True)
            if chance.random() < 0.2:
                tokens = torch.cat([tokens, prompt(2, len(apart), seed=7)], 1)
            together, latest = forward(model, together, tokens)
            alone = [forward(model, twin, tokens[row : row + 1]) for row, twin in enumerate(apart)]
            apart = [cache for cache, _ in alone]
            close(latest, torch.cat([logits for _, logits in alone]))
        if turn == 1:
            for cache in (together, *apart):
                cache.crop(-1)
            again = prompt(1, len(apart), seed=8)
            together, latest = forward(model, together, again)
            alone = [forward(model, twin, again[row : row + 1]) for row, twin in enumerate(apart)]
            close(latest, torch.cat([logits for _, logits in alone]))
        if turn == 2:
            keep = torch.tensor([2, 0])
            together.batch_select_indices(keep)
            apart, latest = [apart[row] for row in keep], latest[keep]
    assert together is not None
    assert sc.lengths(together).tolist() == [int(sc.lengths(cache)) for cache in apart]
    assert len(set(sc.lengths(together).tolist())) == len(apart)
    pool = required_session(together).tiers.pool
    assert pool.held == sum(-(-length // 256) for length in sc.lengths(together).tolist())
    drop(together)
    assert pool.held == 0


def pool_of(cache: DynamicCache) -> PagePool:
    session = required_session(cache)
    return batch_pool(session.options, session.layers)


def left_padded(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    longest = max(ids.shape[1] for ids in prompts)
    ids, mask = (
        torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in rows])
        for rows in (prompts, [torch.ones_like(ids) for ids in prompts])
    )
    return ids, mask


def joined(model: Any, lengths: Sequence[int] = (SHORT, LONG, MIDDLE)) -> DynamicCache:
    return sc.join([forward(model, None, prompt(length, seed=length))[0] for length in lengths])


@pytest.fixture
def default() -> Any:
    return compiled("default")


def compiled(setting: str, **changes: Any) -> Any:
    """Return a model of one layer: rows join and leave in each layer alike."""
    return compiled_with(tiny_llama(**{"num_hidden_layers": 1, **changes}), SETTINGS[setting])


def test_a_split_cache_equals_the_joined_caches(default: Any) -> None:
    cache = joined(default)
    assert sc.lengths(cache).tolist() == [SHORT, LONG, MIDDLE]
    for length, part in zip((SHORT, LONG, MIDDLE), sc.split(cache), strict=True):
        before, _ = forward(default, None, prompt(length, seed=length))
        for state, expected in zip(*(in_rows(required_session(held)) for held in (part, before)), strict=True):
            for name, tensor in expected.items():
                if name != "host":  # which is undefined after its tokens
                    assert torch.equal(state[name], tensor), name
        for got, expected in zip(sc.materialize(part).layers, sc.materialize(before).layers, strict=True):
            assert torch.equal(got.keys, expected.keys)
            assert torch.equal(got.values, expected.values)


def test_a_joined_cache_is_compressed_out_of_16_bits(default: Any) -> None:
    below = compiled_with(tiny_llama(num_hidden_layers=1), {**SETTINGS["default"], "min_context": 4096})
    caches = [joined(default), joined(below)]
    assert [required_session(cache).tiers.pending for cache in caches] == [None, None]
    close(
        *(forward(model, cache, prompt(1, 3, seed=5))[1] for model, cache in zip((default, below), caches, strict=True))
    )


def test_a_join_over_the_budget_of_the_host_tier_is_refused() -> None:
    cache = forward(compiled("offload", **TINIEST), None, prompt(SHORT, vocabulary=64))[0]
    memory = 2 * pool_of(cache).page_bytes["host"]
    limited = compiled_with(tiny_llama(**TINIEST), {**SETTINGS["offload"], "host_memory": memory})
    caches = [forward(limited, None, prompt(length, vocabulary=64))[0] for length in (SHORT, MIDDLE, LONG)]
    assert sc.lengths(sc.join(caches[:2])).tolist() == [SHORT, MIDDLE]
    with pytest.raises(SpecacheError, match="3 more pages of 256 tokens are needed"):
        sc.join(caches)


def test_plain_copies_are_left_padded_like_a_batch() -> None:
    model, plain = compiled("offload", num_hidden_layers=2), tiny_llama()
    prompts = [prompt(length, seed=length) for length in (SHORT, MIDDLE)]
    ids, mask = left_padded(prompts)
    cache = sc.join([forward(model, None, row)[0] for row in prompts])
    positions = (mask.cumsum(1) - 1).clamp(0)
    with torch.no_grad():
        expected = cache_of(plain(ids, attention_mask=mask, position_ids=positions, use_cache=True))
    for ours, theirs in zip(sc.materialize(cache).layers, expected.layers, strict=True):
        there = mask[:, None, :, None].bool()
        torch.testing.assert_close(ours.keys, theirs.keys.masked_fill(~there, 0.0), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.values, theirs.values.masked_fill(~there, 0.0), atol=1e-4, rtol=1e-4)


def test_joined_rows_under_a_left_padded_mask_equal_rows_without_a_mask(default: Any) -> None:
    caches, lengths = [joined(default), joined(default)], torch.tensor([SHORT, LONG, MIDDLE])
    mask = (torch.arange(LONG + 1) >= LONG - lengths[:, None]).long()
    ids = prompt(1, 3, seed=5)
    with torch.no_grad():
        padded = default(ids, attention_mask=mask, **with_cache(caches[0]), position_ids=lengths[:, None])
    assert torch.equal(padded.logits[:, -1], forward(default, caches[1], ids)[1])


@pytest.fixture
def tiniest() -> Any:
    return compiled("default", **TINIEST)


def test_two_hundred_joins_and_leaves_compile_nothing_and_leave_nothing(tiniest: Any) -> None:
    from specache_compile.compile.rewrites import observers

    made, chance = list[Any](), random.Random(5)
    alone = [
        forward(tiniest, None, prompt(length, seed=length, vocabulary=64))[0] for length in (SHORT, MIDDLE, LONG, 300)
    ]
    pool = pool_of(alone[0])
    alone = [in_pages(cache, pool) for cache in alone]
    together = reserve_cache_rows(copy.deepcopy(alone[0]), 8)
    together, _ = forward(tiniest, together, prompt(1, vocabulary=64))
    rows = 1
    frames = None
    for turn in range(200):
        together = append_rows(together, copy.deepcopy(alone[turn % 4]))
        rows += 1
        if turn % 5 == 1:
            together, _ = forward(tiniest, together, prompt(1, rows, vocabulary=64))
        if rows > 6:
            stay = sorted(chance.sample(range(rows), 3))
            keep_rows(together, stay if turn % 2 else [stay[2], *stay[:2]])
            rows = 3
        if frames is None:  # the first step of two rows has compiled for any number
            together, _ = forward(tiniest, together, prompt(1, rows, vocabulary=64))
            frames = torch._dynamo.utils.counters["frames"]["ok"]
            observers.append(lambda *form: made.append(form))
    observers.pop()
    assert not made
    assert torch._dynamo.utils.counters["frames"]["ok"] == frames
    shared = pool.held
    for cache in (together, *alone):
        drop(cache)
    assert shared <= sum((1, 1, 1, 2)) + 2 * rows  # all rows share full pages
    assert pool.held == 0


def test_positions_that_the_model_would_count_are_refused(default: Any) -> None:
    cache = joined(default)
    with torch.no_grad(), pytest.raises(SpecacheError, match=r"position_ids.*specache_compile\.lengths"):
        default(prompt(1, 3), **with_cache(cache), use_cache=True)
    forward(default, cache, prompt(1, 3))  # which goes on


def test_a_mask_that_contradicts_the_cache_is_refused(default: Any) -> None:
    cache, lengths = joined(default), torch.tensor([SHORT, LONG, MIDDLE])
    mask = torch.ones(3, LONG + 1, dtype=torch.long)
    with torch.no_grad(), pytest.raises(SpecacheError, match="mask differs from the lengths"):
        default(prompt(1, 3), attention_mask=mask, **with_cache(cache), position_ids=lengths[:, None])


def test_caches_that_cannot_be_joined_are_refused_with_a_reason(default: Any) -> None:
    first = forward(default, None, prompt(60))[0]
    with pytest.raises(SpecacheError, match="the list of caches is empty"):
        sc.join([])
    with pytest.raises(SpecacheError, match="plain tensors already"):
        sc.join([first, cache_of(step(tiny_llama(num_hidden_layers=1), prompt(60)))])
    with pytest.raises(SpecacheError, match="different models"):
        sc.join([first, forward(compiled("default"), None, prompt(60))[0]])
    dropping = compiled_with(
        tiny_llama(num_hidden_layers=1), {"method": "snapkv", "budget": 48, "window": 16, "lowering": "eager"}
    )
    with pytest.raises(SpecacheError, match="'snapkv' requires rows of one length"):
        sc.split(cache_of(step(dropping, prompt(60, 2))))
    holes = torch.ones(2, 60, dtype=torch.long)
    holes[0, 5:9] = 0
    with pytest.raises(SpecacheError, match="padding that is not in front"):
        sc.split(cache_of(step(default, prompt(60, 2), attention_mask=holes)))
