"""host_tier=False: KIVI as its authors define it, with nothing on the host, and errors for what it does not support."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

import specache_compile as sc
from conftest import eager, prompt, step
from specache_compile.compat import cache_of
from specache_compile.errors import SpecacheError
from specache_compile.runtime.session import session_of
from specache_compile.runtime.step import Step

pytestmark = [pytest.mark.one_process, pytest.mark.one_trace]

WITHOUT = {
    "kivi": {"method": "kivi", "bits": 2, "group_size": 32, "residual_length": 32, "host_tier": False},
    "kivi, 16 bits first": {"method": "kivi", "bits": 2, "group_size": 32, "residual_length": 32, "host_tier": False,
                            "min_context": 90},
    "k = 0": {"setting": "paper", "top_k": 0, "group_size": 32, "residual_length": 32, "host_tier": False},
    "k = 0, rotated": {"top_k": 0, "group_size": 32, "residual_length": 32, "host_tier": False},
}  # fmt: skip


def filled(options: dict[str, Any], llama: Any, tokens: int = 100) -> tuple[Any, Any]:
    model = eager(llama, **options)
    return model, cache_of(step(model, prompt(tokens)))


@pytest.mark.quick_for("k = 0, rotated")
@pytest.mark.parametrize("name", WITHOUT)
def test_it_generates_what_it_generates_with_a_host_tier_bit_for_bit(name: str, llama: Any) -> None:
    """What only extends and crops read changes no decode step."""
    options = WITHOUT[name]
    runs = []
    for host in (True, False):
        model, cache = filled({**options, "host_tier": host}, llama, 80)
        runs.append([step(model, prompt(1, seed=n), cache).logits for n in range(30)])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.mark.quick_for("kivi, 16 bits first")
@pytest.mark.parametrize("name", WITHOUT)
def test_nothing_lies_on_the_host_as_explain_predicted(name: str, llama: Any) -> None:
    options = WITHOUT[name]
    model, cache = filled(options, llama)
    said = sc.stats(model)
    explained = sc.explain(llama, prompt_length=100, options={**options, "min_context": 0})
    assert said.host_bytes == 0 == explained.bytes_by_tier["host"]
    assert said.bytes_to_host == 0
    assert all("host" not in state for state in session_of(cache).state)


def test_a_crop_within_the_window_is_right(llama: Any) -> None:
    """100 tokens, of which 64 are rounded: what comes behind 98 is what came behind them before."""
    model, cache = filled(WITHOUT["kivi"], llama, 98)
    expected = step(model, prompt(1), copy.deepcopy(cache)).logits
    for _ in range(2):
        step(model, prompt(1, seed=3), cache)
    cache.crop(-2)
    assert torch.equal(step(model, prompt(1), cache).logits, expected)


REFUSED: dict[str, Callable[[Any, Any], object]] = {
    "a call of several tokens": lambda model, cache: step(model, prompt(5), cache),
    "a crop to 40 tokens": lambda model, cache: (cache.crop(-60), step(model, prompt(1), cache)),
    "a copy of its keys and values": lambda model, cache: sc.materialize(cache),
}


@pytest.mark.parametrize("what", REFUSED)
def test_operations_that_need_every_pair_raise(what: str, llama: Any) -> None:
    model, cache = filled(WITHOUT["kivi"], llama)
    with pytest.raises(SpecacheError, match=f"host_tier=False: {what}.*host_tier=True"):
        REFUSED[what](model, cache)


def test_an_interrupted_step_is_not_gone_on_from(llama: Any) -> None:
    model, cache = filled(WITHOUT["kivi"], llama)
    step(model, prompt(1), cache)
    with patch.object(Step, "run_graph", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        step(model, prompt(1), cache)
    with pytest.raises(SpecacheError, match="interrupted"):
        step(model, prompt(1), cache)
