"""A call that no compiled graph runs (Dynamo's recompile limit, or an uncompiled model) makes a held cache plain.

The tokens are those of the uncompiled model. One warning states the reason, the size, and the limit to raise.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, LogitsProcessor

import specache_compile as sc
from conftest import (
    compile_copy,
    eager,
    forget_warnings,
    greedy,
    is_held,
    left_padding,
    prompt,
    step,
    tiny_llama,
)
from families import BY_NAME
from specache_compile.compat import cache_of
from specache_compile.compile import recompile_limit
from specache_compile.methods import every_method
from specache_compile.runtime.session import Session, session_of


@pytest.fixture(autouse=True)
def dynamo_as_before() -> Iterator[None]:
    with limit(8):
        yield
    torch.compiler.set_stance("default")
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def shallow() -> LlamaForCausalLM:
    """Return a Llama of one layer: the limit counts graphs, whatever their depth."""
    return tiny_llama(num_hidden_layers=1)


@contextmanager
def limit(graphs: int) -> Iterator[None]:
    """Within it, this backend too has so many graphs of one function."""
    limits = torch._dynamo.config.patch(recompile_limit=graphs, accumulated_recompile_limit=256)
    with limits, patch.object(recompile_limit, "LEAST", 1):
        yield


@contextmanager
def warned(*times: int) -> Iterator[list[str]]:
    """Within it, so many warnings (one of `times`) that a cache became plain; they are in the list afterwards."""
    messages: list[str] = []
    forget_warnings()
    with warnings.catch_warnings(record=True, action="always") as seen:
        yield messages
    messages += [str(w.message) for w in seen if w.category is sc.SpecacheWarning and "became plain" in str(w.message)]
    assert len(messages) in times


class AfterTokens(LogitsProcessor):
    """Calls `then` when so many tokens have been made."""

    def __init__(self, tokens: int, then: Callable[[], Any]) -> None:
        self.left, self.then = tokens, then

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            self.then()
        return scores


def run_uncompiled() -> None:
    torch.compiler.set_stance("force_eager")


def ask_for_another_graph() -> None:
    """Of every phase: each graph is guarded by this setting, which changes no number here."""
    torch.use_deterministic_algorithms(True, warn_only=True)


IDS = prompt(90, 3)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {}, "beams": {"num_beams": 3}, "padded": {"attention_mask": left_padding(IDS, 0, 20, 81)},
}  # fmt: skip


@pytest.mark.quick_for("beams")
@pytest.mark.parametrize("way", WAYS)
def test_the_limit_half_way_changes_no_token(shallow: LlamaForCausalLM, way: str) -> None:
    """The compiled steps before have quantised, fetched and, with beams, reordered."""
    twin = compile_copy(shallow)
    with limit(2), warned(1):
        tokens = greedy(twin, IDS, 20, logits_processor=[AfterTokens(11, ask_for_another_graph)], **WAYS[way])
    assert sc.stats(twin).decodes == 10
    assert torch.equal(tokens, greedy(shallow, IDS, 20, **WAYS[way]))


@pytest.mark.quick_for("gpt_oss")
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama, dynamic rope"])
def test_beside_sliding_layers_and_graph_breaks(name: str) -> None:
    """Before the window (24 tokens) is full, and after."""
    plain = BY_NAME[name].model()
    model, expected = compile_copy(plain), greedy(copy.deepcopy(plain), prompt(10), 30)
    for after in (6, 25) if name == "gemma2" else (6,):
        with warned(1):
            tokens = greedy(model, prompt(10), 30, logits_processor=[AfterTokens(after, run_uncompiled)])
        assert torch.equal(tokens, expected)
        torch.compiler.set_stance("default")


@pytest.mark.quick_for("h2o")
@pytest.mark.parametrize(
    "method", [name for name, one in every_method().items() if not any(field.has_all_pairs for field in one.fields)]
)
def test_a_method_that_evicts_has_no_plain_cache_to_give(shallow: LlamaForCausalLM, method: str) -> None:
    """It raises, and the cache is unchanged."""
    twin = eager(shallow, method=method, budget=4096)
    cache = cache_of(step(twin, prompt(50)))
    with warned(0), pytest.raises(sc.SpecacheError, match=r"its policy chose.*_dynamo.config.recompile_limit"):
        step(shallow, prompt(1), cache)
    expected = step(shallow, prompt(1), cache_of(step(shallow, prompt(50)))).logits
    torch.testing.assert_close(step(twin, prompt(1), cache).logits, expected, atol=1e-3, rtol=1e-4)


def disabled(shallow: LlamaForCausalLM) -> Any:
    twin = compile_copy(copy.deepcopy(shallow))
    twin.forward = torch.compiler.disable(twin.forward)
    return twin


def edit(cache: Any) -> None:
    cache.crop(-7)
    cache.reorder_cache(torch.tensor([1, 0, 1]))
    cache.batch_repeat_interleave(2)


def test_a_step_that_no_call_of_this_model_would_have_rewritten_makes_the_cache_plain(
    shallow: LlamaForCausalLM,
) -> None:
    twin, mask = compile_copy(shallow), torch.zeros(1, 1, 1, 1)
    held, plain = (cache_of(step(model, prompt(50))) for model in (twin, shallow))
    with warned(1) as messages:
        logits = step(twin, prompt(1), held, attention_mask=mask).logits
    torch.testing.assert_close(
        logits, step(shallow, prompt(1), plain, attention_mask=mask).logits, atol=1e-3, rtol=1e-4
    )
    assert "has no column for each key" in messages[0]
    assert "no compiled graph" not in messages[0]
    assert not is_held(held)


@pytest.mark.one_process
class TestOneGraph:
    """Of caches that one compiled prefill has made, and no compiled step."""

    @pytest.mark.parametrize("edited", [lambda cache: None, edit], ids=["", "after edits"])
    @pytest.mark.parametrize("uncompiled", [lambda model: model, disabled], ids=["another model", "disabled"])
    def test_a_held_cache_goes_to_an_uncompiled_model(
        self, llama: LlamaForCausalLM, compiled: LlamaForCausalLM, uncompiled: Any, edited: Any
    ) -> None:
        held, plain = (cache_of(step(model, prompt(90, 3))) for model in (compiled, llama))
        edited(held)
        edited(plain)
        rows = plain.layers[0].keys.shape[0]
        with warned(1):
            logits = step(uncompiled(llama), prompt(1, rows), held).logits
        torch.testing.assert_close(logits, step(llama, prompt(1, rows), plain).logits, atol=1e-3, rtol=1e-4)
        assert not is_held(held)

    def test_keys_and_values_are_copied_once_each_when_they_are_read(
        self, llama: LlamaForCausalLM, compiled: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not a whole cache beside the tiers at the first layer, and no layer over PCIe twice."""
        copied: list[tuple[int, str]] = []
        plain = Session.plain

        def noted(self: Session, layer: int, part: Any) -> Tensor:
            copied.append((layer, part))
            return plain(self, layer, part)

        monkeypatch.setattr(Session, "plain", noted)
        cache = cache_of(step(compiled, prompt(50, 2)))
        for _ in range(2):
            step(llama, prompt(1, 2), cache)
        assert copied == [(0, "keys"), (0, "values"), (1, "keys"), (1, "values")]

    def test_the_tiers_are_given_back_with_the_last_layer(
        self, llama: LlamaForCausalLM, compiled: LlamaForCausalLM
    ) -> None:
        cache = cache_of(step(compiled, prompt(50, 2)))
        session = weakref.ref(session_of(cache))
        step(llama, prompt(1, 2), cache)
        gc.collect()
        assert session() is None

    def test_the_warning_has_the_reason_the_size_and_the_limit_to_raise(
        self, llama: LlamaForCausalLM, compiled: LlamaForCausalLM
    ) -> None:
        cache = cache_of(step(compiled, prompt(1024, 2)))
        with warned(1) as messages:
            step(llama, prompt(1, 2), cache)
        # Two layers of keys and values, two heads of 16 channels in float32: 512 bytes a token.
        for part in (
            "1.00 MiB on the device for 1,024 tokens x batch 2",
            "torch._dynamo.config.recompile_limit",
            "recompile_limit= to torch.compile",
            "TORCH_LOGS=recompiles",
            "Pass the cache to the compiled model only",
        ):
            assert part in messages[0]
