"""Caches that share pages: each generates the same as alone, whatever the others do and whatever fails."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

import specache_compile as sc
from conftest import compiled_with, failing, prompt, step, tiny_llama
from held_tiers import AfterLines, Interrupt, at_hand, differences, held
from specache_compile.compat import cache_of
from specache_compile.kernels.attention import extend
from specache_compile.kernels.movement import copy_stream
from specache_compile.kernels.state.page_table import PAGE
from specache_compile.paging import pool as pools
from specache_compile.paging.pool import PagePool
from specache_compile.runtime import tiers as tiers_module
from specache_compile.runtime.session import session_of

SMALL = {"lowering": "eager", "group_size": 32, "residual_length": 32, "top_k": 8}
METHODS = {
    "default": SMALL,
    "16 bits on the host": {**SMALL, "host_bits": 16},
    "h2o": {"lowering": "eager", "method": "h2o", "budget": 400},
    **{method: {"lowering": "eager", "method": method} for method in ("full", "offload", "fp8", "kcache")},
}


pytestmark = pytest.mark.one_process


@functools.cache
def model_of(method: str, layers: int = 1) -> LlamaForCausalLM:
    return compiled_with(tiny_llama(num_hidden_layers=layers), METHODS[method])


@pytest.fixture
def model() -> LlamaForCausalLM:
    return model_of("default")


def pool_of(cache: DynamicCache) -> PagePool:
    pool: PagePool | None = at_hand(cache).tiers.pool
    assert pool is not None
    return pool


def go_on(model: Any, cache: DynamicCache, *calls: int) -> list[Tensor]:
    """Return the last logits of further calls of so many tokens each."""
    rows = at_hand(cache).tiers.batch
    return [step(model, prompt(tokens, rows, seed=7 + n), cache).logits[:, -1] for n, tokens in enumerate(calls)]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The pages that are copied, as (from, to)."""
    found, copy_page = [], PagePool.copy

    def counted(pool: PagePool, source: int, target: int, other: PagePool | None = None) -> None:
        found.append((source, target))
        copy_page(pool, source, target, other)

    monkeypatch.setattr(PagePool, "copy", counted)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_copies_that_share_pages_generate_as_caches_of_their_own(method: str) -> None:
    """Both continue, over a page's end, and one is cropped into the shared pages."""
    model, ids = model_of(method), prompt(500, 2)
    first, second, third, alone = (cache_of(step(model, ids)) for _ in range(4))
    expected = [go_on(model, first, 1, 30, 1), go_on(model, second, 40, 1)]
    if method != "h2o":
        third.crop(-260)
        expected.append(go_on(model, third, 1, 300, 1))
    ours = [alone, copy.deepcopy(alone), *([copy.deepcopy(alone)] if method != "h2o" else [])]
    if method != "h2o":
        ours[2].crop(-260)
    found = [
        go_on(model, cache, *calls) for cache, calls in zip(ours, ((1, 30, 1), (40, 1), (1, 300, 1)), strict=False)
    ]
    assert all(equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_copy_costs_its_table_and_the_buffers_of_its_rows(model: LlamaForCausalLM) -> None:
    cache = cache_of(step(model, prompt(3000)))
    pool = pool_of(cache)
    before, held_before = pool.pages, pool.held
    copies = [copy.deepcopy(cache) for _ in range(8)]
    assert all(pool_of(each) is pool for each in copies)
    assert (pool.pages, pool.held) == (before, held_before)
    assert max(pool.counts.values()) == 9
    del copies
    gc.collect()
    assert pool.held == held_before
    assert max(pool.counts.values()) == 1


@pytest.mark.parametrize("method", ["full", "offload", "default"])
def test_the_first_step_after_a_copy_copies_the_last_page(method: str, copied: list[tuple[int, int]]) -> None:
    model = model_of(method)
    cache = cache_of(step(model, prompt(900)))
    twin = copy.deepcopy(cache)
    copied.clear()
    step(model, prompt(1), twin)
    assert len(copied) == 1
    step(model, prompt(1), cache)
    step(model, prompt(1), twin)
    assert len(copied) == 1, "then each has a page of its own"


def test_copies_with_other_hidden_tokens_do_not_share_their_codes(model: LlamaForCausalLM) -> None:
    """Hidden tokens do not count in the ranges of the codes that the window's tokens get later."""
    ids, seen = prompt(510), torch.ones(1, 512 + 60, dtype=torch.int64)
    hidden = seen.clone()
    hidden[:, 490:500] = 0

    def continued(mask: Tensor, cache: DynamicCache) -> list[Tensor]:
        first = step(model, prompt(40, seed=3), cache, attention_mask=mask[:, :550]).logits[:, -1]
        return [first, *go_on(model, cache, 1)]

    start = cache_of(step(model, ids))
    expected = [continued(mask, cache_of(step(model, ids))) for mask in (seen, hidden, seen)]
    copies = [copy.deepcopy(start), copy.deepcopy(start), start]
    found = [continued(mask, cache) for mask, cache in zip((seen, hidden, seen), copies, strict=True)]
    assert all(equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("tokens", "hidden", "cropped"), [(700, 0, 200), (1100, 12, 60)])
def test_a_crop_of_a_copy_leaves_the_other_cache_as_it_was(tokens: int, hidden: int, cropped: int) -> None:
    """Codes after hidden tokens are computed again, without the mask: they go to a page of their own."""
    model, mask = model_of("16 bits on the host"), torch.ones(2, tokens, dtype=torch.long)
    mask[0, tokens - 100 : tokens - 100 + hidden] = 0
    cache = cache_of(step(model, prompt(tokens, 2), attention_mask=mask))
    before, twin = held(at_hand(cache)), copy.deepcopy(cache)
    twin.crop(-cropped)
    go_on(model, twin, 20, 20, 60, 1)
    assert not differences(before, held(at_hand(cache)))


def test_rows_that_are_selected_share_pages_until_they_write(
    model: LlamaForCausalLM, copied: list[tuple[int, int]]
) -> None:
    """As in a beam search: only partly filled pages are copied."""
    cache = cache_of(step(model, prompt(600, 3)))
    other = cache_of(step(model, prompt(600, 3)))
    pool = pool_of(cache)
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert at_hand(cache).tiers.most_rows == 2, "no padding row writes to a page of a row"
    cache.batch_repeat_interleave(2)
    assert pool_of(cache).held == 6
    copied.clear()
    found = go_on(model, cache, 1, 1)
    assert len(copied) == 2
    other.reorder_cache(torch.tensor([2, 2, 0, 0]))
    assert equal(found, go_on(model, other, 1, 1))
    assert pool_of(cache) is pool


def test_a_selection_that_runs_out_of_memory_changes_nothing() -> None:
    model = model_of("16 bits on the host")
    cache = cache_of(step(model, prompt(300, 3)))
    other = copy.deepcopy(cache)
    before = held(at_hand(cache))
    cache.reorder_cache(torch.tensor([1, 1, 0, 2]))
    out_of_memory = patch.object(tiers_module, "row_state", side_effect=torch.OutOfMemoryError)
    with out_of_memory, pytest.raises(torch.OutOfMemoryError):
        step(model, prompt(1, 4), cache)
    assert not differences(before, held(session_of(cache)))
    other.reorder_cache(torch.tensor([1, 1, 0, 2]))
    assert equal(go_on(model, cache, 1, 1), go_on(model, other, 1, 1))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["16 bits on the host", "full", "h2o"])
def test_growth_that_fails_can_be_repeated(method: str, error: type[BaseException]) -> None:
    """In the middle of a pool's tensors, or of the buffers of rows that grow (h2o)."""
    model, ids = model_of(method, 2), prompt(250)
    cache, other = (cache_of(step(model, ids)) for _ in range(2))
    module, name = (tiers_module, "row_state") if method == "h2o" else (pools, "empty")
    fails = patch.object(module, name, failing(getattr(module, name), error, call=2))
    with fails, pytest.raises(error):
        step(model, prompt(300, seed=5), cache)
    if module is pools:
        pool = pool_of(cache)
        assert {len(tensor) for state in pool.state for tensor in state.values()} == {pool.pages}
    found, expected = (step(model, prompt(300, seed=5), each).logits[:, -1] for each in (cache, other))
    assert torch.equal(found, expected)
    assert equal(go_on(model, cache, 1, 1), go_on(model, other, 1, 1))


@pytest.mark.parametrize("cropped", [0, 500])
@pytest.mark.parametrize("method", ["default", "full", "h2o"])
def test_a_loaded_session_grows_over_its_pages_and_its_bucket(tmp_path: Path, method: str, cropped: int) -> None:
    """Also after a crop, of a method that drops pairs too, whose buffers stay as large as before the crop."""
    model = model_of(method)
    cache = cache_of(step(model, prompt(500 + cropped, 2)))
    if cropped:
        cache.crop(-cropped)
    sc.save(cache, tmp_path)
    assert equal(go_on(model, sc.load(tmp_path, model), 100, 1, 600, 1), go_on(model, cache, 100, 1, 600, 1))


def test_a_row_without_tokens_is_copied_saved_and_loaded(model: LlamaForCausalLM, tmp_path: Path) -> None:
    cache = sc.join([cache_of(step(model, prompt(length))) for length in (30, 300)])
    cache.crop(-30)
    assert [len(row) for row in at_hand(cache).tiers.pages] == [0, 2]
    sc.save(cache, tmp_path)
    places = {"position_ids": torch.tensor([[0], [270]])}
    caches = [cache, copy.deepcopy(cache), sc.load(tmp_path, model)]
    first, *others = (step(model, prompt(1, 2), each, **places).logits[:, -1] for each in caches)
    assert equal(others, [first, first])


def test_threads_continue_copies_that_share_a_pool_which_grows(model: LlamaForCausalLM) -> None:
    cache = cache_of(step(model, prompt(250)))
    expected = go_on(model, copy.deepcopy(cache), *[40] * 12)
    caches = [copy.deepcopy(cache) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda each: go_on(model, each, *[40] * 12), caches))
    assert all(equal(logits, expected) for logits in found)
    assert len({id(pool_of(each)) for each in caches}) == 1


def test_a_pool_waits_for_the_copies_of_each_cache(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its pages move, and before pages of a cache that has died are allocated."""
    cache = cache_of(step(model, prompt(300)))
    made = copy.deepcopy(cache)
    pool, waited = pool_of(made), list[int]()
    monkeypatch.setattr(copy_stream, "drain", lambda device: waited.append(len(pool.free)))
    pool.grow_to(pool.pages, pool.backed)
    assert len(waited) == 1
    pool.grow_to(pool.pages + 1, pool.backed + 1)
    del made
    gc.collect()
    for expected in (1, 0):
        waited.clear()
        assert pool.allocate(1)
        assert len(waited) == expected


@pytest.mark.parametrize("work", ["copy", "materialize", "save", "crop", "split", "join"])
def test_what_uses_pages_waits_for_the_step_of_another_cache(
    work: str, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    """The step may move them."""
    cache = cache_of(step(model, prompt(300)))
    other = copy.deepcopy(cache)
    works = {
        "copy": lambda: copy.deepcopy(cache),
        "materialize": lambda: sc.materialize(cache),
        "save": lambda: sc.save(cache, tmp_path),
        "crop": lambda: (cache.crop(-100), sc.lengths(cache)),
        "split": lambda: sc.split(cache),
        "join": lambda: sc.join([cache, cache_of(step(model, prompt(300)))]),
    }
    thread = threading.Thread(target=works[work])
    with pool_of(other).lock:
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
    thread.join()
    assert equal(go_on(model, other, 1, 1), go_on(model, cache_of(step(model, prompt(300))), 1, 1))


def test_pages_of_ranks_depend_on_lengths_alone(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy has its own pool: when dead caches free their pages differs between ranks."""
    monkeypatch.setattr(tiers_module, "gather", lambda ranks, own: [own])
    cache = cache_of(step(model, prompt(500)))
    session = at_hand(cache)
    session.tiers.ranks = object()
    twin = session.tiers.copy()
    assert twin.pool is not session.tiers.pool
    assert twin.pages == session.tiers.pages == [[0, 1]]
    for ours, theirs in zip(twin.state, session.tiers.state, strict=True):
        assert torch.equal(ours["codes"][:2], theirs["codes"][:2])


def test_pages_are_counted_again_after_an_interrupt(model: LlamaForCausalLM) -> None:
    """After an interrupt between allocating a page and giving it to a row."""
    cache = cache_of(step(model, prompt(500)))
    pool, copied = pool_of(cache), copy.deepcopy(cache)
    out_of_memory = patch.object(PagePool, "copy", side_effect=torch.OutOfMemoryError)
    with out_of_memory, pytest.raises(torch.OutOfMemoryError):
        step(model, prompt(1), copied)
    assert pool.held == 2
    go_on(model, copied, 300, 1)
    assert pool.held == len({page for each in (cache, copied) for row in at_hand(each).tiers.pages for page in row})


def test_tiers_that_are_interrupted_at_any_line_leave_no_page(model: LlamaForCausalLM) -> None:
    cache = cache_of(step(model, prompt(500)))
    tiers, pool = at_hand(cache).tiers, pool_of(cache)
    other = at_hand(cache_of(step(model, prompt(300)))).tiers
    rows = [(tiers, 0), (other, 0)]
    with AfterLines(None) as counter:
        tiers_module.joined(rows)
    assert counter.lines > 20
    for moment in range(1, counter.lines + 1):
        with contextlib.suppress(Interrupt), AfterLines(moment) as interrupted:
            tiers_module.joined(rows)
        gc.collect()
        assert pool.held == 2, interrupted.last


def test_copies_with_the_same_pages_are_compressed_apart() -> None:
    model = compiled_with(tiny_llama(num_hidden_layers=1), {**SMALL, "host_bits": 16, "min_context": 1100})

    def alone() -> DynamicCache:
        cache = cache_of(step(model, prompt(700)))
        cache.crop(-450)
        step(model, prompt(1), cache)
        return cache

    first, second, other = alone(), alone(), alone()
    twin = copy.deepcopy(first)
    (first,), (twin,), (second,), (other,) = map(sc.split, (first, twin, second, other))
    assert at_hand(first).options.bits < 16
    for n in range(3):
        first_logits, twin_logits, *expected = (
            step(model, prompt(20, seed=n), each).logits[:, -1] for each in (first, twin, second, other)
        )
        assert equal([first_logits, twin_logits], expected)


@pytest.mark.parametrize("tokens", [200, 4350])
def test_a_table_whose_writing_is_interrupted_is_written_by_the_next_step(model: LlamaForCausalLM, tokens: int) -> None:
    cache = cache_of(step(model, prompt(tokens)))
    other = cache_of(step(model, prompt(tokens)))
    twin = copy.deepcopy(cache)
    interrupted = patch.object(tiers_module.Tiers, "set_pages", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        step(model, prompt(3), cache)
    expected = go_on(model, other, 3, 3, 100)
    assert equal(go_on(model, cache, 3, 3, 100), expected)
    assert equal(go_on(model, twin, 3, 3, 100), expected)


def test_a_copy_needs_the_host_memory_of_the_pages_it_writes() -> None:
    page = pool_of(cache_of(step(model_of("default"), prompt(3000)))).page_bytes["host"]
    model = compiled_with(tiny_llama(num_hidden_layers=1), {**SMALL, "host_memory": 13 * page})
    cache = cache_of(step(model, prompt(3000)))
    twin = copy.deepcopy(cache)
    step(model, prompt(1), twin)
    with pytest.raises(sc.SpecacheError, match="3,328 tokens"):
        step(model, prompt(256), cache)


def test_rows_of_equal_length_read_pages_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("full")
    cache = cache_of(step(model, prompt(700, 3)))
    read: Any = extend.tokens_of
    copied = list[int]()

    def counted(pairs: Any, start: int, stop: int) -> Tensor:
        copied.append(stop - start)
        return read(pairs, start, stop)

    monkeypatch.setattr(extend, "tokens_of", counted)
    step(model, prompt(1, 3), cache)
    assert copied == [700 % PAGE] * len(copied)
    assert copied
