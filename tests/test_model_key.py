"""The key of a model changes with everything that affects its results, and with nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from adapted import Adapted, adapt
from conftest import prompt, tiny_llama
from families import FAMILIES, Family
from specache_compile.model_key import Watch, model_key, prefill_key, sampled


def new_parameter(model: Any) -> None:
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach() + 0.1)


def new_data(model: Any) -> None:
    model.model.norm.weight.data = model.model.norm.weight.data + 0.1


def by_numpy(model: Any) -> None:
    model.lm_head.weight.detach().numpy()[...] += 0.1


WRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda model: model.lm_head.weight.add_(0.1),
    "in place, a value": lambda model: model.lm_head.weight[3, 5].add_(0.1),
    "data.copy_": lambda model: model.lm_head.weight.data.copy_(model.lm_head.weight + 0.1),
    "data +=": lambda model: model.model.layers[0].self_attn.k_proj.weight.data.add_(0.1),
    "data =": new_data,
    "numpy": by_numpy,
    "a new parameter": new_parameter,
    "a buffer": lambda model: model.model.rotary_emb.inv_freq.data.mul_(2.0),
}
SETTINGS: dict[str, Callable[[Any], object]] = {
    "a number": lambda model: setattr(model.model.layers[1].self_attn, "scaling", 1.0),
    "an active adapter": lambda model: [layer.set_adapter("two") for layer in adapted(model)],
    "disabled adapters": lambda model: [setattr(layer, "_disable_adapters", True) for layer in adapted(model)],
    "a scaling": lambda model: [layer.scaling.update(one=9.0) for layer in adapted(model)],
    "merged adapters": lambda model: [layer.merged_adapters.append("one") for layer in adapted(model)],
}


def adapted(model: Any) -> list[Adapted]:
    return [module for module in model.modules() if isinstance(module, Adapted)]


@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_a_write_to_one_tensor_changes_the_key(write: str) -> None:
    model = tiny_llama()
    before, watch = model_key(model), Watch(model)
    assert model_key(model) == before
    assert watch.holds()
    WRITES[write](model)
    assert model_key(model) != before
    assert not watch.holds()


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_of_the_modules_changes_the_key(setting: str) -> None:
    model = adapt(tiny_llama())
    before, prefill, watch = model_key(model), prefill_key(model, model.parameters()), Watch(model)
    SETTINGS[setting](model)
    assert model_key(model) != before
    assert not watch.holds()
    after = prefill_key(model, model.parameters())
    assert after.weights == prefill.weights
    assert after.settings != prefill.settings


def test_training_changes_the_key_within_a_process_alone() -> None:
    model = tiny_llama()
    before, prefill = model_key(model), prefill_key(model, model.parameters())
    model.train()
    model.model.gradient_checkpointing = True
    assert prefill_key(model, model.parameters()) == prefill
    assert model_key(model) != before
    model.eval()
    assert model_key(model) == before


@pytest.mark.quick_for("llama 3", "phi3, longrope", "gpt_oss", "deepseek_v3", "qwen3_5_text", "falcon_h1", "minimax")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_generating_changes_no_key(family: Family) -> None:
    model = family.one_layer.model()
    before, prefill = model_key(model), prefill_key(model, model.parameters())
    model.generate(prompt(30, 2), max_new_tokens=3)
    assert model_key(model) == before
    assert prefill_key(model, model.parameters()) == prefill


def test_a_prefills_key_is_the_same_in_another_process_and_under_a_wrapper(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    key = prefill_key(model, model.parameters())
    for other in (AutoModelForCausalLM.from_pretrained(tmp_path), torch.compile(model)):
        assert prefill_key(other, other.parameters()) == key
    assert prefill_key(model.model, model.parameters()) == key


def test_tensors_of_tensors_are_sampled_and_those_without_memory_are_not() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    first, second = torch.arange(1000.0), torch.arange(6).view(2, 3).t()
    kinds = [kind for kind, _ in sampled([TwoTensor(first, first + 1), second, torch.empty(3, device="meta")])]
    assert kinds == ["(1000,) torch.float32", "(1000,) torch.float32", "(3, 2) torch.int64"]
    (_, values), *_ = sampled([first.to(torch.bfloat16)])
    assert values == bytes(first.to(torch.bfloat16)[::3].contiguous().view(torch.uint8).tolist())
