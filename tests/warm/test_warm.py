"""A process that follows another takes what that one kept, if and only if it would have compiled the same."""

from __future__ import annotations

import builtins
import contextlib
import copy
import functools
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama import modeling_llama

import specache_compile as sc
from adapted import adapt
from conftest import LOSSLESS
from kept_traces import ALL, FULL, PROMPT, SIZES, STEPS, Traces, llama, logits, run
from specache_compile.methods import METHODS
from specache_compile.passes.recipe import Recipe


@pytest.mark.parametrize("options", [LOSSLESS, {**LOSSLESS, "lowering": "inductor"}], ids=["eager", "inductor"])
@pytest.mark.quick_for("eager")
def test_the_next_process_traces_nothing_and_generates_the_same(traces: Traces, options: dict[str, Any]) -> None:
    model = llama(num_hidden_layers=5)  # enough for Inductor to compile one of them for all
    assert run(model, traces, ALL, options=options) == 3
    assert run(model, traces, ALL, options=options) == 0
    assert sc.stats(model).decodes == STEPS


def test_a_cache_moves_over_in_the_next_process_too(traces: Traces) -> None:
    options = {**LOSSLESS, "min_context": PROMPT + 2}
    assert run(llama(), traces, ALL, options=options) == 3
    assert run(llama(), traces, ALL, options=options) == 0


def test_other_weights_of_the_same_shapes_are_used(kept: Traces) -> None:
    other = llama()
    for weight in other.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    assert run(other, kept, ALL) == 0


def doubled_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    rotate = modeling_llama.rotate_half
    return q * cos + 2 * rotate(q) * sin, k * cos + 2 * rotate(k) * sin


def halved_mlp(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) / 2


def biased_linear(self: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, self.weight, self.bias) + 0.01


def scaled_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, position_bias: Any = None, cache: Any = None,
    **given: Any,
) -> Any:  # fmt: skip
    """With the signature of transformers' own: only the guard on the function itself distinguishes them."""
    before = modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa_before"]
    return before(module, query, key, value, attention_mask, dropout, 0.3, is_causal, **given)


def registered() -> Any:
    """Another function under the name of the model's attention."""
    mapping = AttentionInterface._global_mapping
    return patch.dict(mapping, sdpa_before=mapping["sdpa"], sdpa=scaled_attention)


def with_hook(model: Any) -> Any:
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, made: made * 1.5)
    return model


def with_own_forward(model: Any) -> Any:
    mlp = model.model.layers[0].mlp
    mlp.forward = types.MethodType(halved_mlp, mlp)
    return model


CHANGED: dict[str, Callable[[], Any]] = {
    "another dtype": lambda: llama().double(),
    "another attention implementation": lambda: llama(attn_implementation="eager"),
    "another constant of the config": lambda: llama(rms_norm_eps=1e-2),
    "other heads": lambda: llama(num_key_value_heads=2),
    "another activation": lambda: llama(hidden_act="gelu"),
    "another class of the same shapes": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval(),
    "an adapter": lambda: adapt(llama()),
    "a hook": lambda: with_hook(llama()),
    "a forward of one module's own": lambda: with_own_forward(llama()),
    "a frozen weight": lambda: llama().requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGED)
@pytest.mark.quick_for("a hook", "an adapter")
def test_another_model_is_traced(kept: Traces, change: str) -> None:
    assert run(CHANGED[change](), kept) == 1


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (modeling_llama, "apply_rotary_pos_emb", doubled_rope),
        (modeling_llama.LlamaMLP, "forward", halved_mlp),
        (nn.Linear, "forward", biased_linear),
    ],
    ids=["a function", "a method", "a method of torch's"],
)
@pytest.mark.quick_for("a method")
def test_a_model_whose_code_is_another_is_traced_each_way(kept: Traces, where: Any, name: str, value: Any) -> None:
    """As after an edit of its file: and what it left is not taken for the code as it was."""
    with patch.object(where, name, value):
        assert run(llama(), kept) == 1
        assert run(llama(), kept) == 0
    assert run(llama(), kept) == 0


def own_builtin() -> contextlib.AbstractContextManager[None]:
    """Another function under a builtin's name, which no module's source or functions show."""
    return patch.object(builtins, "all", functools.partial(builtins.all))


@pytest.mark.slow
@pytest.mark.parametrize("change", [registered, own_builtin])
def test_another_function_under_a_known_name_is_traced(
    kept: Traces, change: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    with change():
        assert run(llama(), kept) == 1
    assert run(llama(), kept) == 0


def recipe_of_others(options: Any, site: int) -> Recipe:
    return METHODS["full"].recipe(options, site)


def test_a_method_of_another_package_is_not_kept(kept: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing shows when its source changes."""
    monkeypatch.setitem(METHODS, "others", replace(METHODS["full"], name="others", recipe=recipe_of_others))
    for _ in range(2):
        assert run(llama(), kept, options={**FULL, "method": "others"}) == 1


def test_values_without_another_guard_are_checked_before_the_first_call(kept: Traces) -> None:
    """A mapping of the instance's own hides that of its class, at which the guards of what it holds look."""
    functions = modeling_llama.ALL_ATTENTION_FUNCTIONS
    before = functions._global_mapping
    other = {**before, "sdpa_before": before["sdpa"], "sdpa": scaled_attention}
    with patch.object(functions, "_global_mapping", other):
        assert run(llama(), kept) == 1


def test_two_models_of_one_class_with_other_options_in_one_process(kept: Traces) -> None:
    """Each has its own graphs: Dynamo compares the backend's options in every call."""
    kept.next_process()
    first, second = llama(), copy.deepcopy(llama())
    one = torch.compile(first, backend="specache", options=FULL)
    two = torch.compile(second, backend="specache", options={"method": "offload", "lowering": "eager"})
    want = logits(first)
    for _ in range(2):
        torch.testing.assert_close(logits(one), want, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(logits(two), want, atol=2e-5, rtol=2e-5)
    assert [sc.stats(model).host_bytes > 0 for model in (first, second)] == [False, True]
    assert kept.count == 3


@pytest.mark.slow
def test_another_batch_size_is_served(kept: Traces) -> None:
    assert run(llama(), kept, ALL, rows=2) <= 3
    assert run(llama(), kept, ALL, rows=3) == 0


def test_a_change_in_the_process_that_took_it_is_noticed(kept: Traces) -> None:
    kept.next_process()
    model = llama()
    compiled = torch.compile(model, backend="specache", options=FULL)
    logits(compiled)
    assert kept.count == 0
    with registered():
        torch.testing.assert_close(logits(compiled), logits(model), atol=2e-5, rtol=2e-5)
    model.model.layers[0].mlp.act_fn = nn.ReLU()
    torch.testing.assert_close(logits(compiled), logits(model), atol=2e-5, rtol=2e-5)
    assert kept.count == 6


def test_a_phase_that_was_not_kept_is_traced_and_kept_behind_it(traces: Traces, folder: Path) -> None:
    sizes = (PROMPT, 1)
    assert run(llama(), traces, sizes, options=LOSSLESS) == 2
    for file in folder.glob("*/*/*/pre-decode-*"):
        file.unlink()
    assert run(llama(), traces, sizes, options=LOSSLESS) == 1
    assert run(llama(), traces, sizes, options=LOSSLESS) == 0
