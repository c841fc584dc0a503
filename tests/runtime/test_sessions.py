"""Sessions and held tensors: no pair lost, none shared, none stale, and all memory given back."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import mmap
import pickle
import random
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from transformers import DynamicCache, LlamaForCausalLM

import specache_compile as sc
from conftest import compile_copy, failing, greedy, prompt, step, tiny_llama
from held_tiers import AfterLines, at_hand, differences, in_rows
from specache_compile.caches.joining import in_pages
from specache_compile.compat import cache_of
from specache_compile.kernels.memory import host_memory
from specache_compile.kernels.movement import copy_stream, tier_ops
from specache_compile.paging.pool import batch_pool
from specache_compile.runtime.session import session_of
from specache_compile.runtime.step import Step

pytestmark = [pytest.mark.one_process, pytest.mark.one_trace]


def random_walk(model: LlamaForCausalLM, twin: LlamaForCausalLM, seed: int) -> None:
    """Steps, extends, crops, reorders, repeats, selections and forks, in any order, on both models' caches; drafts that
    one of them alone makes, takes back, and verifies."""
    rng = random.Random(seed)
    ids = prompt(rng.randrange(1, 90), 2, seed)
    caches = [cache_of(step(m, ids)) for m in (model, twin)]
    for _ in range(40):
        action = rng.choice(["step", "step", "step", "extend", "verify", "crop", "reorder", "repeat", "select", "fork"])
        batch, length = caches[0].layers[0].keys.shape[0], caches[0].get_seq_length()
        if action in ("step", "extend"):
            ids = prompt(1 if action == "step" else rng.randrange(2, 70), batch, rng.randrange(1000))
            caches = [cache_of(step(m, ids, c)) for m, c in zip((model, twin), caches, strict=True)]
        elif action == "verify":
            drafted = rng.randrange(1, 40)
            for place in range(drafted):
                step(twin, prompt(1, batch, place), caches[1])
            caches[1].crop(-drafted)
            ids, rejected = prompt(drafted + 1, batch, rng.randrange(1000)), rng.randrange(drafted + 1)
            for m, cache in zip((model, twin), caches, strict=True):
                step(m, ids, cache)
                cache.crop(-rejected)
        elif action == "crop":
            dropped = rng.randrange(0, min(length, 60))
            for cache in caches:
                cache.crop(-dropped)
        elif action == "fork":
            old, caches = caches, copy.deepcopy(caches)
            step(twin, prompt(1, batch, 5), old[1])
        else:
            rows = torch.tensor(
                [rng.randrange(batch) for _ in range(batch if action == "reorder" else rng.randrange(1, 4))]
            )
            for cache in caches:
                if action == "reorder":
                    cache.reorder_cache(rows)
                elif action == "select":
                    cache.batch_select_indices(rows)
                elif batch < 4:
                    cache.batch_repeat_interleave(2)
        assert caches[0].get_seq_length() == caches[1].get_seq_length()
        for ours, theirs in zip(sc.materialize(caches[1]).layers, caches[0].layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)


@pytest.mark.parametrize("seed", range(4))
def test_host_tier_equals_hf_cache_bit_for_bit_after_a_random_walk(seed: int) -> None:
    """One layer, whose keys and values no attention has touched, in one lane: HF's own cache is the exact reference."""
    model = tiny_llama(num_hidden_layers=1)
    random_walk(model, compile_copy(model, speculate=False, top_k=16), seed)


@pytest.mark.parametrize("length", [1, 31, 63, 64, 95, 96, 140, 169])
def test_after_a_crop_every_tier_holds_the_tokens_it_should(llama: LlamaForCausalLM, length: int) -> None:
    """As if the cache had only ever seen the first `length` tokens; at 16 bits this is exact in every tier."""
    twin = compile_copy(llama, bits=16)
    cache = cache_of(step(twin, prompt(170)))
    cache.crop(length - 170)
    session = at_hand(cache)
    low_bit = max(0, (length - 32) // 32 * 32)
    for state in in_rows(session):
        host = state["host"][:, :, :length]
        assert torch.equal(state["codes"][:, :, :low_bit], host[:, :, :low_bit].flatten(3))
        assert torch.equal(state["recent"][:, :, torch.arange(low_bit, length) % 64], host[:, :, low_bit:])
        assert (state["slot_index"] < low_bit).all()


def test_a_view_that_was_looked_at_can_be_edited_further(llama: LlamaForCausalLM) -> None:
    """Cropped, looked at and cropped again it is the cache that was cropped at once; the view between is stale."""
    twin, token = compile_copy(llama), torch.tensor([[7]])
    once, twice = (cache_of(step(twin, prompt(120))) for _ in range(2))
    once.crop(-30)
    twice.crop(-10)
    assert sc.lengths(twice).tolist() == [110]
    between = copy.copy(twice)
    between.layers = [copy.copy(layer) for layer in twice.layers]
    twice.crop(-20)
    assert sc.lengths(twice).tolist() == [90]
    with pytest.raises(sc.HeldTensorError, match="keys and values are stale"):
        sc.lengths(between)
    fork = copy.deepcopy(twice)
    expected = step(twin, token, once).logits
    assert torch.equal(step(twin, token, twice).logits, expected)
    assert torch.equal(step(twin, token, fork).logits, expected)


def test_memory_is_freed_with_the_cache() -> None:
    """A shared trace would keep the inputs of its first call, so this model has its own."""
    twin = compile_copy(tiny_llama())
    greedy(twin, prompt(20), 5)

    def live_bytes() -> int:
        gc.collect()
        return sum(t.nbytes for t in gc.get_objects() if type(t) is torch.Tensor and t.device.type == "cpu")

    before = live_bytes()
    cache = cache_of(step(twin, prompt(3000)))
    step(twin, prompt(1), cache)
    session = session_of(cache)
    tiers = sum(t.nbytes for layer in session.state for t in layer.values())
    assert live_bytes() - before >= 0.99 * tiers > 1_000_000
    del cache, session
    assert live_bytes() - before < 0.02 * tiers


@pytest.mark.parametrize("copies", ["put", "pairs_at"])
def test_a_step_whose_copy_fails_can_be_taken_again(llama: LlamaForCausalLM, copies: str) -> None:
    """The error surfaces in the step. In every use the cache is as before the step, and it dies when dropped."""

    def raising(*given: Any) -> None:
        whole(*given)
        raise MemoryError("no host memory left")

    def step_after(edit: Callable[[DynamicCache], object]) -> Callable[[DynamicCache], torch.Tensor]:
        return lambda cache: (edit(cache), step(twin, prompt(1, 2), cache))[1].logits

    uses: list[Callable[[DynamicCache], torch.Tensor]] = [
        step_after(lambda cache: None),
        step_after(lambda cache: cache.crop(-2)),
        step_after(lambda cache: cache.reorder_cache(torch.tensor([1, 0]))),
        lambda cache: step(twin, prompt(1, 2), copy.deepcopy(cache)).logits,
        lambda cache: sc.materialize(copy.deepcopy(cache)).layers[1].values,
    ]
    whole, twin = getattr(tier_ops, copies), compile_copy(llama, lowering="eager")
    cache = cache_of(step(twin, prompt(100, 2)))
    step(twin, prompt(1, 2), cache)
    expected = [use(copy.deepcopy(cache)) for use in uses]
    for number, use in enumerate(uses):
        again = copy.deepcopy(cache)
        session = weakref.ref(session_of(again))
        for _ in range(2):
            with patch.object(tier_ops, copies, raising), pytest.raises(MemoryError, match="no host memory left"):
                step(twin, prompt(1, 2, seed=7), again)
        torch.testing.assert_close(use(again), expected[number], atol=1e-4, rtol=1e-4)
        del again
        gc.collect()
        assert session() is None, f"use {number}"


def test_an_interrupted_step_can_be_taken_again(llama: LlamaForCausalLM) -> None:
    """After a crop. `interrupted_behind` has steps without edits."""
    twin = compile_copy(llama)
    tokens = prompt(101)
    expected = step(llama, tokens[:, 100:], cache_of(step(llama, tokens[:, :100]))).logits
    cache = cache_of(step(twin, torch.cat([tokens[:, :100], prompt(7, seed=8)], 1)))
    cache.crop(-7)
    step(twin, tokens[:, 100:], copy.deepcopy(cache))
    interrupted = failing(Step.run_graph, KeyboardInterrupt, after=True)
    with patch.object(Step, "run_graph", interrupted), pytest.raises(KeyboardInterrupt):
        step(twin, tokens[:, 100:], cache)
    torch.testing.assert_close(step(twin, tokens[:, 100:], cache).logits, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("batched", [False, True], ids=["own pool", "pool of a batch"])
def test_an_interrupted_selection_of_rows_happens_once(batched: bool) -> None:
    """At any line, and the pages of the other rows are free afterwards."""
    twin = compile_copy(tiny_llama(num_hidden_layers=1), bits=1)
    cache = cache_of(step(twin, prompt(1, 3), cache_of(step(twin, prompt(270, 3)))))
    if batched:
        cache = in_pages(cache, batch_pool(session_of(cache).options, session_of(cache).layers))
    pool = session_of(cache).tiers.pool
    held = pool.held

    def selected(moment: int | None) -> tuple[AfterLines, Any, Any]:
        chosen = copy.deepcopy(cache)
        chosen.reorder_cache(torch.tensor([0, 2]))
        with contextlib.suppress(KeyboardInterrupt), AfterLines(moment) as lines:
            at_hand(chosen)
        session = at_hand(chosen)
        layers = [{**layer, "host": layer["host"][:, :, :271]} for layer in in_rows(session)]
        return lines, session, (session.progress.lengths, layers)

    lines, _, expected = selected(None)
    assert lines.lines > 100
    for moment in range(1, lines.lines, 5):
        seen, session, found = selected(moment)
        assert found[0] == expected[0], seen.last
        assert not differences(found[1], expected[1]), seen.last
        del session, found
        assert pool.held == held, seen.last


@pytest.mark.quick_for("itself")
@pytest.mark.parametrize("fork", [False, True], ids=["itself", "its fork"])
@torch.no_grad()
def test_a_token_that_a_mask_hid_and_the_next_one_or_no_mask_shows_is_chosen_for_the_slots(
    llama: LlamaForCausalLM, fork: bool
) -> None:
    ids, mask, other = prompt(103, 2), *torch.ones(2, 2, 103, dtype=torch.int64)
    mask[0, 50] = other[1, 20] = 0

    def last(model: LlamaForCausalLM, later: torch.Tensor | None) -> torch.Tensor:
        cache = cache_of(step(model, ids[:, :100], attention_mask=mask[:, :100]))
        for n in (101, 102):
            step(model, ids[:, n - 1 : n], cache, attention_mask=mask[:, :n])
        return step(model, ids[:, 102:], copy.deepcopy(cache) if fork else cache, attention_mask=later).logits

    twin = compile_copy(llama)
    for later in (None, other):
        torch.testing.assert_close(last(twin, later), last(llama, later), atol=1e-3, rtol=1e-4)


class TestHeldTensors:
    def cache(self) -> tuple[LlamaForCausalLM, DynamicCache]:
        twin = compile_copy(tiny_llama())
        return twin, cache_of(step(twin, prompt(50, 2)))

    @torch.no_grad()
    def test_a_copy_and_its_original_are_continued_by_one_graph(self) -> None:
        twin, cache = self.cache()
        graphs = []
        for continued in (copy.deepcopy(cache), cache):
            step(twin, prompt(1, 2), continued)
            graphs.append(counters["stats"]["unique_graphs"])
        assert graphs[0] == graphs[1]

    @pytest.mark.parametrize(
        "read",
        [
            lambda t: t + 1,
            lambda t: t.tolist(),
            lambda t: t.numpy(),
            lambda t: torch.cat([t, torch.zeros(2, 2, 50, 16)], 0),
            lambda t: torch.cat([torch.zeros(2, 2, 1, 16), t], -2),
            lambda t: t[:, :, 3:],
            lambda t: t[:, 0],
            lambda t: t[0],
            lambda t: t[None],
            lambda t: t.to(torch.float64),
        ],
    )
    def test_any_read_raises_and_names_materialize(self, read: Any) -> None:
        _, cache = self.cache()
        with pytest.raises(sc.HeldTensorError, match=r"specache backend keeps .*materialize") as raised:
            read(cache.layers[0].keys)
        assert "recompile" not in str(raised.value)

    @pytest.mark.parametrize("save", [pickle.dumps, lambda cache: torch.save(cache, io.BytesIO())])
    def test_a_held_cache_is_not_saved_but_its_plain_copy_is(self, save: Any) -> None:
        twin, cache = self.cache()
        with pytest.raises(sc.HeldTensorError, match=r"specache_compile.save\(cache, folder\) .*materialize"):
            save(cache)
        saved = io.BytesIO()
        torch.save(sc.materialize(cache), saved)
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)
        expected = step(tiny_llama(), prompt(1, 2), loaded).logits
        torch.testing.assert_close(step(twin, prompt(1, 2), cache).logits, expected, atol=1e-3, rtol=1e-4)

    def test_layers_from_different_caches_are_refused(self) -> None:
        twin, cache = self.cache()
        other = cache_of(step(twin, prompt(50, 2, seed=9)))
        cache.layers[1] = other.layers[1]
        with pytest.raises(sc.SpecacheError, match="different caches"):
            step(twin, prompt(1, 2), cache)


# What HF's own cache takes for batch_select_indices, of a batch of 4.
ROWS: dict[str, Any] = {
    "tuple": (0, 2),
    "slice with a step": slice(0, None, 2),
    "array of booleans": np.array([True, False, False, True]),
    "negative tensor": torch.tensor([-2]),
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_batch_select_indices_takes_what_hfs_own_cache_takes(llama: LlamaForCausalLM, rows: Any) -> None:
    logits = []
    for model in (llama, compile_copy(llama)):
        cache = cache_of(step(model, prompt(70, 4)))
        cache.batch_select_indices(rows)
        logits.append(step(model, prompt(1, cache.layers[0].keys.shape[0]), cache).logits)
    torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("rows", [(0, 4), [-5, 0], range(3, 6), np.array([4]), torch.tensor([1, -5]), [True, False]])
def test_rows_that_the_batch_has_not_are_an_index_error_as_hfs(llama: LlamaForCausalLM, rows: Any) -> None:
    """In the same words, which name the index and the batch size; the cache is as it was."""
    plain, held = (cache_of(step(model, prompt(40, 4))) for model in (llama, compile_copy(llama)))
    with pytest.raises(IndexError) as expected:
        plain.batch_select_indices(rows)
    with pytest.raises(IndexError, match=r"(index -?\d .*with size 4|shape .*\[2\].*\[4)") as raised:
        held.batch_select_indices(rows)
    assert str(raised.value).split("[4")[0] == str(expected.value).split("[4")[0]
    assert held.layers[0].keys.shape == (4, 2, 40, 16)


def test_half_of_what_is_free_is_the_host_tiers_default_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 1000

    monkeypatch.setattr(host_memory.psutil, "virtual_memory", Memory)
    monkeypatch.setattr(host_memory, "remaining_memory", lambda: None)
    assert host_memory.allowance(0, None) == 500
    assert host_memory.allowance(200, None) == 600  # what is held already is not free, and is its own
    assert host_memory.allowance(0, 12) == 12
    # Four ranks of a machine share its memory; what is held is a rank's own.
    assert [host_memory.allowance(*given, 4) for given in ((0, None), (100, None), (0, 400))] == [125, 175, 100]
    monkeypatch.setattr(host_memory, "remaining_memory", lambda: 400)
    assert host_memory.allowance(0, None) == 200  # a container's limit that is nearer
    monkeypatch.setattr(host_memory, "remaining_memory", lambda: 4000)
    assert host_memory.allowance(0, None) == 500


def test_the_host_tier_has_memory_in_finer_steps_than_buckets_and_a_step_stays_recorded_meanwhile() -> None:
    """4,100 tokens: a bucket of 4,608, and memory for 4,352, until there are more."""
    model = tiny_llama(num_hidden_layers=1)
    settings, token = {"top_k": 8, "lowering": "eager", "setting": "paper"}, 2 * 2 * 16 * 4
    twin = compile_copy(model, **settings, host_memory=4608 * token)
    ids = prompt(5000)
    cache = cache_of(step(twin, ids[:, :4100]))
    session = session_of(cache)
    explained = sc.explain(model, 4100, options=settings)
    assert sc.stats(twin).bytes_by_tier["host"] == explained.bytes_by_tier["host"] == 4352 * token
    host = session.state[0]["host"]
    recorded = session.recorded.steps[None] = None
    cache = cache_of(step(twin, ids[:, 4100:4353], cache))
    assert sc.stats(twin).bytes_by_tier["host"] == 4608 * token
    assert session.state[0]["host"] is host
    assert session.recorded.steps == {None: recorded}
    with pytest.raises(sc.SpecacheError, match=r"the host tier would need .* 4,864 tokens"):
        step(twin, ids[:, 4353:4609], cache)
    assert (session.tiers.capacity, session.tiers.pool.backed) == (4608, 18)


def test_the_cursor_is_written_without_copies_from_the_host(compiled: LlamaForCausalLM) -> None:
    """On CUDA a copy of one number from host memory stops the host, in every step; a fill does not."""
    session = session_of(cache_of(step(compiled, prompt(100))))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        Step(session, 1).write_cursor()
    names = {event.name for event in profile.events()}
    assert "aten::fill_" in names
    assert "aten::copy_" not in names
    assert session.cursor[0, :3].tolist() == [100, 64, 64]


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="only Linux has huge pages")
def test_the_host_tier_lies_in_huge_pages_and_in_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own account of the mapping: hg, huge pages advised; dc, not copied on fork; not sh, shared."""
    monkeypatch.setattr(host_memory.PinnedMap, "pin", lambda *given: True)
    monkeypatch.setattr(host_memory, "_pool", host_memory.Pool())
    tensor = host_memory.host_empty((1 << 22,), torch.float32, torch.device("cuda"))
    areas = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    flags = next(
        area.split("VmFlags:")[1].split()
        for area in areas[1:]
        if int(area.split("-")[0], 16) <= tensor.data_ptr() < int(re.split(r"[- ]", area)[1], 16)
    )
    assert {"hg", "dc"} <= set(flags)
    assert "sh" not in flags
    assert not tensor.any()


def test_a_step_that_raised_leaves_no_staging_behind(compiled: LlamaForCausalLM) -> None:
    session = session_of(cache_of(step(compiled, prompt(40))))
    staging = copy_stream.staging_of(torch.device("cpu"))
    Step(session, 1).abandon()
    assert copy_stream.staging_of(torch.device("cpu")) is not staging
