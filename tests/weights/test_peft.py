"""A model with LoRA adapters generates as it does uncompiled, whichever of its layers of wrapping is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import specache_compile as sc
from conftest import LOSSLESS, greedy, is_held, prompt, tiny_llama
from specache_compile.compat import with_cache
from specache_compile.model_key import Watch, model_key

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]


def lora(task: str | None = "CAUSAL_LM", rank: int = 4) -> Any:
    """A tiny model with two random adapters, "default" active, and "other"."""
    import peft  # here, so that nobody pays for it who does not run these tests

    config = peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type=task)
    model = peft.get_peft_model(tiny_llama(num_hidden_layers=1), config)
    model.add_adapter("other", config)
    return model.eval()


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="specache", options=LOSSLESS)


def said(model: Any, cache: DynamicCache | None = None, ids: Tensor | None = None) -> Tensor:
    ids = prompt(60) if ids is None else ids
    return greedy(model, None, 12, input_ids=ids, **with_cache(DynamicCache() if cache is None else cache))


def assert_same(model: Any, plain: Any) -> Tensor:
    """Returns what both said."""
    cache = DynamicCache()
    made = said(model, cache)
    assert torch.equal(made, said(plain))
    assert is_held(cache)
    return made


@pytest.mark.parametrize("task", ["CAUSAL_LM", None])
def test_a_compiled_peft_model_generates_compressed(task: str | None) -> None:
    """With a task it has a `generate` of its own, and without it the base model's."""
    wrapped = lora(task)
    assert_same(compiled(wrapped), lora(task))
    assert sc.stats(wrapped).pre_decodes == 1, "two lanes"
    assert wrapped._compiled_call_impl is None
    assert wrapped.get_base_model()._compiled_call_impl is None


def test_a_model_compiled_before_it_is_wrapped_generates_compressed() -> None:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    inner = tiny_llama(num_hidden_layers=1)
    inner.compile(backend="specache", options=LOSSLESS)
    model = peft.get_peft_model(inner, config).eval()
    cache = DynamicCache()
    made = said(model, cache)
    assert is_held(cache)
    model.get_base_model()._compiled_call_impl = None
    assert torch.equal(made, said(model))


def test_adapters_are_switched_disabled_and_merged() -> None:
    wrapped, plain = lora(), lora()
    model = compiled(wrapped)
    first = assert_same(model, plain)
    for one in (wrapped, plain):
        one.set_adapter("other")
    second = assert_same(model, plain)
    with wrapped.disable_adapter(), plain.disable_adapter():
        third = assert_same(model, plain)
    assert torch.equal(third, said(tiny_llama(num_hidden_layers=1)))
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    assert_same(compiled(wrapped.merge_and_unload()), plain.merge_and_unload())


def test_each_switch_changes_the_models_key() -> None:
    """So a batch forgets what another adapter has computed (tests/batching/test_changed_weights.py)."""
    wrapped = lora()
    layers = [module for module in wrapped.modules() if isinstance(getattr(module, "scaling", None), dict)]
    switches = {
        "another adapter": lambda: wrapped.set_adapter("other"),
        "scaled": lambda: [layer.scaling.update(other=9.0) for layer in layers],
        "disabled": wrapped.base_model.disable_adapter_layers,
        "enabled": wrapped.base_model.enable_adapter_layers,
        "the first adapter again, merged": lambda: (wrapped.set_adapter("default"), wrapped.merge_adapter()),
    }
    for name, switch in switches.items():
        model = wrapped.get_base_model()
        before, watch = model_key(model), Watch(model)
        switch()
        assert model_key(model) != before, name
        assert not watch.holds(), name
