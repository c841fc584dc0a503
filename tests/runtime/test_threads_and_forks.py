"""Several threads generate with one compiled model, and a child of a fork with its parent's."""

from __future__ import annotations

import copy
import multiprocessing
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM, LogitsProcessor

import specache_compile as sc
from conftest import LOSSLESS, compile_copy, greedy, is_held, prompt, step, tiny_llama
from specache_compile import SpecacheWarning
from specache_compile.compat import cache_of, with_cache
from specache_compile.compile import rewrites
from specache_compile.compile.compiled_options import options_of
from specache_compile.runtime.session import session_of

PATIENCE = 60.0  # seconds after which a test that hangs fails instead


@pytest.fixture
def plain() -> LlamaForCausalLM:
    return tiny_llama(num_hidden_layers=1)


def wrap(model: LlamaForCausalLM) -> Any:
    return torch.compile(copy.deepcopy(model), backend="specache", options=LOSSLESS)


class Meet(LogitsProcessor):
    """Has all generations stand at their first step until each of them is there."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self.barrier, self.met = barrier, False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.met:
            self.barrier.wait(PATIENCE)
            self.met = True
        return scores


def together(models: list[Any], tokens: list[int]) -> list[tuple[Tensor, DynamicCache]]:
    """Generations at the same time, a thread for each, and their caches; all are under way at one moment."""
    barrier = threading.Barrier(len(models))

    def generate(seed: int) -> tuple[Tensor, DynamicCache]:
        cache = DynamicCache()
        ids = prompt(60, seed=seed)
        try:
            made = greedy(models[seed], ids, tokens[seed], **with_cache(cache), logits_processor=[Meet(barrier)])
        except BaseException:
            barrier.abort()  # nobody need wait for this one
            raise
        return made, cache

    with warnings.catch_warnings(action="error", category=SpecacheWarning), ThreadPoolExecutor(len(models)) as threads:
        return list(threads.map(generate, range(len(models))))


@pytest.mark.quick_for("wrap")
@pytest.mark.parametrize("compiled", [wrap, compile_copy])
def test_two_threads_generate_with_one_model(plain: LlamaForCausalLM, compiled: Callable[[Any], Any]) -> None:
    """The one that ends first leaves the other's calls compiled."""
    model, tokens = compiled(plain), [6, 24]
    for seed, (made, cache) in enumerate(together([model, model], tokens)):
        assert torch.equal(made, greedy(plain, prompt(60, seed=seed), tokens[seed]))
        assert is_held(cache)
    if compiled is wrap:
        assert model._orig_mod._compiled_call_impl is None, "the wrapped model itself must stay uncompiled"


@pytest.mark.slow
def test_a_thread_generates_with_the_options_of_its_compiled_module(plain: LlamaForCausalLM) -> None:
    """One wrapped model, compiled twice, and not at all."""
    twin = copy.deepcopy(plain)
    models = [torch.compile(twin, backend="specache", options={**LOSSLESS, "bits": bits}) for bits in (1, 2)]
    ran = together([*models, twin], [24, 12, 24])
    for seed, (made, cache) in enumerate(ran):
        assert torch.equal(made, greedy(plain, prompt(60, seed=seed), made.shape[1] - 60))
        assert is_held(cache) == (seed < 2)
    assert [session_of(cache).options.bits for _, cache in ran[:2]] == [1, 2]
    assert twin._compiled_call_impl is None


def test_a_call_on_one_thread_is_compiled_while_another_thread_generates(plain: LlamaForCausalLM) -> None:
    model = wrap(plain)
    seen: list[Any] = []

    class Calls(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            def call() -> None:
                seen.append((options_of(model._orig_mod), step(model, prompt(60, seed=9))))

            if not seen:
                thread = threading.Thread(target=call)
                thread.start()
                thread.join(PATIENCE)
            return scores

    assert torch.equal(greedy(model, prompt(60), 8, logits_processor=[Calls()]), greedy(plain, prompt(60), 8))
    options, out = seen[0]
    assert options is None, "what another thread calls the wrapped model with is no business of this one"
    assert is_held(cache_of(out))
    torch.testing.assert_close(out.logits, plain(prompt(60, seed=9)).logits, atol=1e-3, rtol=0)


def test_a_generation_that_fails_leaves_the_wrapped_model_uncompiled(plain: LlamaForCausalLM) -> None:
    model = wrap(plain)
    with pytest.raises(KeyboardInterrupt):
        greedy(model, prompt(60), 8, logits_processor=[Mock(side_effect=KeyboardInterrupt)])
    assert model._orig_mod._compiled_call_impl is None


def in_a_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a child that is forked now."""
    fork = multiprocessing.get_context("fork")
    mine, its = fork.Pipe(duplex=False)

    def run() -> None:
        torch.set_num_threads(1)  # torch itself: a child has none of the threads that OpenMP would wait for
        its.send(work())

    child = fork.Process(target=run)
    child.start()
    try:
        assert mine.poll(PATIENCE), "the child hangs"
        return mine.recv()
    finally:
        child.kill()
        child.join()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_goes_on_with_its_parents_cache_and_so_does_the_parent(plain: LlamaForCausalLM) -> None:
    model, cache = compile_copy(plain), DynamicCache()
    said = greedy(model, prompt(60), 12, **with_cache(cache))
    turns = [torch.cat([said, prompt(5, seed=seed)], 1) for seed in (7, 8)]
    expected = [greedy(plain, turn, 12) for turn in turns]

    def child() -> list[Any]:
        new = greedy(model, prompt(60), 12)
        old = greedy(model, turns[1], 12, **with_cache(cache))
        return [new.tolist(), old.tolist(), sc.stats(model).decodes]

    new, old, decodes = in_a_child(child)
    assert (new, old) == (said.tolist(), expected[1].tolist())
    assert decodes > 0
    assert torch.equal(greedy(model, turns[0], 12, **with_cache(cache)), expected[0])


def test_two_threads_that_come_to_min_context_at_once_rewrite_one_after_the_other(
    plain: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake mode is on one thread at a time."""
    twin, making, most = compile_copy(plain, min_context=200), [], []
    made_late = rewrites.made_late

    def slowly(*given: Any) -> Any:
        making.append(threading.get_ident())
        most.append(len(making))
        time.sleep(0.2)
        try:
            return made_late(*given)
        finally:
            making.remove(threading.get_ident())

    caches = [cache_of(step(twin, prompt(60, seed=seed))) for seed in (0, 1)]
    for cache in caches:
        step(twin, prompt(1), cache)
        step(twin, prompt(30), cache)
    monkeypatch.setattr(rewrites, "made_late", slowly)
    barrier = threading.Barrier(2)

    def grow(cache: DynamicCache) -> Tensor:
        barrier.wait(PATIENCE)
        step(twin, prompt(400, seed=4), cache)
        return step(twin, prompt(1), cache).logits

    with ThreadPoolExecutor(2) as pool:
        logits = [future.result() for future in [pool.submit(grow, cache) for cache in caches]]
    assert most, "forms were made late"
    assert max(most) == 1
    for seed, ours in enumerate(logits):
        ids = torch.cat([prompt(60, seed=seed), prompt(1), prompt(30), prompt(400, seed=4), prompt(1)], 1)
        torch.testing.assert_close(ours[:, -1], step(plain, ids).logits[:, -1], atol=1e-3, rtol=1e-3)
