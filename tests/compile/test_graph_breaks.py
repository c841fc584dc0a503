"""A graph break splits a cache into parts, one for each graph; it must split every phase alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import specache_compile as sc
from conftest import LOSSLESS, compile_copy, greedy, is_held, prompt, step, tiny_llama
from families import Family
from specache_compile.compat import cache_of
from specache_compile.runtime.records import record_of

# Of a layer's output [B, T, width]: whether it is to break the graph.
BREAKS: dict[str, Callable[[Tensor], bool]] = {
    "in the prompt": lambda hidden: hidden.shape[1] > 1,
    "in the steps": lambda hidden: hidden.shape[1] == 1,
    "in both": lambda hidden: True,
}


def broken(model: LlamaForCausalLM, where: str) -> LlamaForCausalLM:
    """A copy, compiled with the lossless settings, with a hook on its first layer that breaks the graph there."""
    return compile_copy(hooked(model, where))


def hooked(model: LlamaForCausalLM, where: str) -> LlamaForCausalLM:
    twin = copy.deepcopy(model)

    def hook(layer: Any, inputs: Any, output: Tensor) -> None:
        if BREAKS[where](output):
            torch._dynamo.graph_break()

    twin.model.layers[0].register_forward_hook(hook)
    return twin


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got.logits, expected.logits, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("where", "why"), [("in the prompt", "a graph break splits"), ("in the steps", "graph breaks")]
)
def test_a_break_in_one_phase_alone_is_an_error_that_leaves_the_cache(
    llama: LlamaForCausalLM, where: str, why: str
) -> None:
    twin = broken(llama, where)
    cache, plain = (cache_of(step(model, prompt(50, 2))) for model in (twin, llama))
    with pytest.raises(sc.SpecacheError, match=why):
        step(twin, prompt(1, 2), cache)
    for ours, theirs in zip(sc.materialize(cache).layers, plain.layers, strict=True):
        torch.testing.assert_close((ours.keys, ours.values), (theirs.keys, theirs.values), atol=1e-4, rtol=1e-4)


@pytest.mark.one_process
class TestParts:
    """Of a cache in two parts, whose prompts, steps and further turns are all in two graphs."""

    def caches(self, llama: LlamaForCausalLM) -> tuple[LlamaForCausalLM, Any, Any]:
        twin = broken(llama, "in both")
        return twin, *(cache_of(step(model, prompt(50, 2))) for model in (twin, llama))

    def test_a_generation_is_compressed_and_has_the_same_tokens(self, llama: LlamaForCausalLM) -> None:
        twin = broken(llama, "in both")
        tokens = greedy(twin, prompt(60), 8, return_dict_in_generate=True)
        assert torch.equal(tokens.sequences, greedy(llama, prompt(60), 8))
        assert is_held(cache_of(tokens))
        assert sc.stats(twin).decodes == 7

    def test_parts_have_edits_and_copies(self, llama: LlamaForCausalLM) -> None:
        twin, held, plain = self.caches(llama)
        for cache in (held, plain):
            cache.crop(-7)
            cache.reorder_cache(torch.tensor([1, 1]))
        fork = copy.deepcopy(held)
        for cache, other, seed in ((held, copy.deepcopy(plain), 3), (fork, plain, 4)):
            for ids in (prompt(1, 2, seed=seed), prompt(9, 2, seed=9)):
                close(step(twin, ids, cache), step(llama, ids, other))

    def test_an_uncompiled_model_goes_on_from_parts(self, llama: LlamaForCausalLM) -> None:
        _, held, plain = self.caches(llama)
        with pytest.warns(sc.SpecacheWarning, match="became plain"):
            got = step(llama, prompt(1, 2), held)
        close(got, step(llama, prompt(1, 2), plain))


@pytest.mark.slow
def test_parts_are_not_drafted_for_and_say_so(llama: LlamaForCausalLM) -> None:
    """A draft marks one session's steps: those of a cache in parts would go on exact, or half of them would."""
    twin = compile_copy(hooked(llama, "in both"), verify=3)
    ids = prompt(60)
    with pytest.warns(sc.SpecacheWarning, match="a graph break in the model splits its cache into parts") as reported:
        tokens = greedy(twin, ids, 12)
    assert len([one for one in reported if "into parts" in str(one.message)]) == 1
    assert torch.equal(tokens, greedy(llama, ids, 12))


@pytest.mark.slow
def test_a_part_that_takes_the_cache_for_its_length_alone_takes_it_in_any_place() -> None:
    """xmod breaks behind its embeddings, whose graph has the cache among its first inputs: Dynamo gives it no more."""
    family = Family("xmod", "XmodConfig", {"default_language": "en_XX", "is_decoder": True, "num_hidden_layers": 1})
    twin = compile_copy(family.model())
    tokens = greedy(twin, prompt(30), 4, return_dict_in_generate=True)
    assert torch.equal(tokens.sequences, greedy(family.model(), prompt(30), 4))
    assert is_held(cache_of(tokens))


def attention_alone(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A copy whose products with weights no graph has, as bitsandbytes' 8-bit ones."""
    twin = copy.deepcopy(model)
    for layer in twin.model.layers:
        for projection in layer.self_attn.children():
            projection.forward = torch.compiler.disable(projection.forward)
    return twin


def test_a_graph_of_attention_alone_is_counted_with_its_model() -> None:
    llama = tiny_llama(num_hidden_layers=1)
    first, second = compile_copy(attention_alone(llama)), compile_copy(attention_alone(llama))
    assert torch.equal(greedy(first, prompt(40), 4), greedy(llama, prompt(40), 4))
    greedy(second, prompt(40), 6)
    assert (sc.stats(first).decodes, sc.stats(second).decodes) == (3, 5)


@pytest.mark.filterwarnings("error::specache_compile.SpecacheWarning")
def test_a_model_that_accelerate_offloads_is_counted() -> None:
    """Each call receives new parameters."""
    llama = tiny_llama(num_hidden_layers=1)
    twin = accelerate.cpu_offload(copy.deepcopy(llama), "cpu")
    twin.compile(backend="specache", options={**LOSSLESS, "speculate": False})
    assert torch.equal(greedy(twin, prompt(40), 4), greedy(llama, prompt(40), 4))
    assert sc.stats(twin).decodes == 3


def test_a_graph_without_parameters_belongs_to_the_model_that_ran_last() -> None:
    record = record_of([torch.nn.Parameter(torch.zeros(1))])
    assert record_of([]) is record
