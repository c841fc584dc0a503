"""Layers that are alike are compiled once, and the folded graph does what the whole graph does."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from conftest import LOSSLESS, greedy, prompt, tiny_llama
from families import FAMILIES, Family
from specache_compile.lowering import lower

BY_NAME = {family.name: family for family in FAMILIES}
# Names, and how many kinds of layers each has.
FOLDED = {
    "llama 3": 1, "mixtral": 1, "gemma2": 2, "gemma3_text": 2, "smollm3": 2, "glm4_moe": 1, "gpt_neox": 1, "opt": 1,
    "gpt_oss": 2,
}  # fmt: skip


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[GraphModule]:
    """The graphs that Inductor would get. In its place they run as they are, with what they were compiled for alone."""
    made: list[GraphModule] = []

    def compile_fx(part: GraphModule, inputs: list[Any], config_patches: dict[str, Any]) -> Any:
        made.append(part)

        def run(*values: Any) -> Any:
            for value, fake in zip(values, inputs, strict=True):
                assert layout(value, fake) == layout(fake, fake)
            return Interpreter(part).run(*values)

        return run

    monkeypatch.setattr(lower, "compile_fx", compile_fx)
    return made


def layout(value: Any, fake: Any) -> Any:
    """What compiled code asserts about an input: all but sizes that are symbols, and strides that tell nothing."""
    if not isinstance(fake, Tensor):
        return type(fake) is torch.SymInt or value
    known = [dim for dim, size in enumerate(fake.shape) if isinstance(size, int)]
    sizes = [value.shape[dim] for dim in known]
    strides = [value.stride(dim) for dim in known if fake.shape[dim] > 1 and isinstance(fake.stride(dim), int)]
    return value.dtype, value.device, value.dim(), sizes, strides


def of_depth(family: Family, layers: int) -> Any:
    """A model of the family with so many layers, of each kind in turn."""
    settings = {**family.settings, "num_hidden_layers": layers}
    for name in ("layer_types", "no_rope_layers"):
        if name in settings:
            settings[name] = settings[name] * (layers // 2)
    return dataclasses.replace(family, settings=settings).model()


def compiled(model: Any, **options: Any) -> Any:
    model.compile(backend="specache", options={**LOSSLESS, "lowering": "inductor", **options})
    return model


@pytest.mark.filterwarnings("ignore::specache_compile.SpecacheWarning")
@pytest.mark.parametrize("name", FOLDED)
def test_a_family_is_compiled_once_a_kind_of_layer(name: str, compiles: list[GraphModule]) -> None:
    """Before the layers, each kind of them, and after them, in each of prefill, pre-decode and decode."""
    model = compiled(of_depth(BY_NAME[name], 4))
    plain = of_depth(BY_NAME[name], 4)
    assert torch.equal(greedy(model, prompt(50), 60), greedy(plain, prompt(50), 60))
    assert len(compiles) == 3 * (FOLDED[name] + 2)


def test_the_number_of_compiled_graphs_does_not_grow_with_the_layers(compiles: list[GraphModule]) -> None:
    counts = []
    for layers in (4, 8):
        torch._dynamo.reset()
        plain = tiny_llama(num_hidden_layers=layers)
        assert torch.equal(greedy(compiled(copy.deepcopy(plain)), prompt(70), 5), greedy(plain, prompt(70), 5))
        counts.append(len(compiles))
    assert counts == [9, 18]


@pytest.mark.parametrize("layers", [2, 3])
def test_few_layers_are_compiled_whole(layers: int, compiles: list[GraphModule]) -> None:
    greedy(compiled(tiny_llama(num_hidden_layers=layers)), prompt(70), 3)
    assert len(compiles) == 3


def test_batches_padding_and_new_buckets(compiles: list[GraphModule]) -> None:
    """Past a bucket while it runs, in chunks, for two batch sizes; each bucket compiles its regions anew."""
    plain = tiny_llama(num_hidden_layers=4)
    model = compiled(copy.deepcopy(plain))
    mask = torch.ones(2, 240, dtype=torch.int64)
    mask[1, :30] = 0
    for inputs in ({"input_ids": prompt(240)}, {"input_ids": prompt(240, 2), "attention_mask": mask}):
        asked = {**inputs, "max_new_tokens": 40, "do_sample": False}
        assert torch.equal(model.generate(**asked), plain.generate(**asked))
    assert len(compiles) % 3 == 0
