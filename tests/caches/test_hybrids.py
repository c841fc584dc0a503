"""Caches of hybrids: operations include the state of a recurrence, which each step writes once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import specache_compile as sc
from conftest import compile_copy, greedy, new_tokens, prompt, step
from families import BY_NAME
from specache_compile.compat import cache_of

pytestmark = pytest.mark.one_process

# A layer with attention and a recurrence beside it; a layer of each; convolutions alone; a cache of a class of its own.
NAMES = [
    "falcon_h1",
    pytest.param("qwen3_5_text", marks=pytest.mark.slow),
    pytest.param("lfm2", marks=pytest.mark.slow),
    pytest.param("minimax", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=NAMES)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Return a hybrid compiled with lossless settings, and the uncompiled model."""
    plain = BY_NAME[request.param].one_layer.model()
    return compile_copy(plain), plain


def continued(model: Any, cache: DynamicCache | None, ids: Tensor, steps: int = 3) -> tuple[Tensor, DynamicCache]:
    """Continue a prompt; returns each step's last logits, and the cache, which the model may create."""
    logits = []
    for _ in range(1 + steps):
        out = step(model, ids, cache)
        cache = cache_of(out)
        logits.append(out.logits[:, -1])
        ids = logits[-1].argmax(-1, keepdim=True)
    assert cache is not None
    return torch.stack(logits), cache


def assert_same(models: tuple[Any, Any], caches: Any, ids: Tensor, steps: int = 3) -> tuple[DynamicCache, DynamicCache]:
    """Require that both models continue a prompt equally, with equal recurrent states."""
    (got, ours), (expected, theirs) = (continued(m, c, ids, steps) for m, c in zip(models, caches, strict=True))
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)
    assert recurrent(ours)
    torch.testing.assert_close(recurrent(ours), recurrent(theirs), atol=1e-4, rtol=1e-4)
    return ours, theirs


def recurrent(cache: Any) -> list[Tensor]:
    """Return every recurrent state of a cache: of its layers, and of MiniMax."""
    names = ("conv_states", "recurrent_states")
    states = [state for layer in cache.layers for name in names for state in getattr(layer, name, {}).values()]
    states = [state for state in states if state is not None]
    return states + [state for state in getattr(cache, "linear_cache", ()) if isinstance(state, Tensor)]


def filled(models: tuple[Any, Any], rows: int = 1) -> tuple[DynamicCache, DynamicCache]:
    return assert_same(models, (None, None), prompt(60, rows))


def test_a_batch_prefills_in_inference_mode_and_goes_on_without() -> None:
    """The state in pages is no inference tensor, which later steps could not write to."""
    model = BY_NAME["falcon_h1"].one_layer.model()
    batch = sc.Batch(compile_copy(model), rows=2)
    request = batch.add(prompt(39), max_new_tokens=6)
    with torch.inference_mode():
        batch.step()
    batch.run()
    assert request.generated == new_tokens(model, prompt(39), 6)


def test_each_token_writes_the_state_once(models: tuple[Any, Any]) -> None:
    """Step by step, with the pre-decode of the first selection."""
    caches = assert_same(models, (None, None), prompt(60), 0)
    for seed in range(5):
        assert_same(models, caches, prompt(1, seed=seed), 0)
    assert sc.stats(models[0]).pre_decodes == 1
    assert_same(models, caches, prompt(7, seed=6), 2)


def test_a_fork_has_a_separate_state(models: tuple[Any, Any]) -> None:
    caches = filled(models)
    forks = copy.deepcopy(caches)
    for seed in (3, 4):
        assert_same(models, caches, prompt(5, seed=seed))
        assert_same(models, forks, prompt(2, seed=10 * seed))


@pytest.mark.slow
def test_rows_of_the_state_go_with_beams(models: tuple[Any, Any]) -> None:
    caches = filled(models, 3)
    for cache in caches:
        cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert_same(models, caches, prompt(1, 3, seed=3))
    arguments = {"num_beams": 3, "num_return_sequences": 3}
    model, plain = models
    assert torch.equal(greedy(model, prompt(60), 8, **arguments), greedy(plain, prompt(60), 8, **arguments))


def test_a_saved_state_goes_on_bit_for_bit(models: tuple[Any, Any], tmp_path: Path) -> None:
    model, _ = models
    ours, theirs = filled(models)
    if type(ours) is not DynamicCache:
        with pytest.raises(sc.SpecacheError, match="is a MiniMaxCache, and only a DynamicCache"):
            sc.save(ours, tmp_path)
        return
    sc.save(ours, tmp_path)
    again = sc.load(tmp_path, model)
    assert [vars(layer).keys() for layer in again.layers] == [vars(layer).keys() for layer in ours.layers]
    torch.testing.assert_close(recurrent(again), recurrent(ours), atol=0, rtol=0)
    assert_same(models, (ours, copy.deepcopy(theirs)), prompt(5, seed=3))
    assert_same(models, (again, theirs), prompt(5, seed=3))
    assert torch.equal(*(continued(model, cache, prompt(1, seed=4))[0] for cache in (ours, again)))
    again.reorder_cache(torch.tensor([0]))


def test_a_plain_copy_has_a_separate_state(models: tuple[Any, Any]) -> None:
    _, plain = models
    ours, theirs = filled(models)
    twin, kept = sc.materialize(ours), copy.deepcopy(theirs)
    assert_same((plain, plain), (twin, theirs), prompt(5, seed=3))
    assert_same(models, (ours, kept), prompt(5, seed=4))


def test_a_crop_is_refused_and_changes_nothing(models: tuple[Any, Any]) -> None:
    """Hugging Face raises this error, since the earlier state is unknown."""
    caches = filled(models)
    with pytest.raises(RuntimeError, match=r"does not (track past states|support `crop`)"):
        caches[0].crop(-3)
    assert_same(models, caches, prompt(5, seed=3))
