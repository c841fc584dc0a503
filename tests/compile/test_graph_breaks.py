"""A graph break in one phase but not in another: the parts of a cache are joined or split, and tokens stay those of the
uncompiled model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import specache_compile as sc
from conftest import compile_copy, greedy, prompt, tiny_llama
from families import Family
from specache_compile.compat import cache_of, with_cache
from specache_compile.runtime.held import HeldTensor
from specache_compile.runtime.session import session_of

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


@torch.no_grad()
def step(model: Any, ids: Tensor, cache: Any = None) -> Any:
    return model(ids, **with_cache(cache), use_cache=True)


def is_held(cache: Any) -> bool:
    return all(isinstance(t, HeldTensor) for layer in cache.layers for t in (layer.keys, layer.values))


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got.logits, expected.logits, atol=1e-3, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("where", BREAKS)
def test_a_generation_is_compressed_and_has_the_same_tokens(llama: LlamaForCausalLM, where: str) -> None:
    twin = broken(llama, where)
    tokens = greedy(twin, prompt(60), 8, return_dict_in_generate=True)
    assert torch.equal(tokens.sequences, greedy(llama, prompt(60), 8))
    assert is_held(cache_of(tokens))
    assert sc.stats(twin).decodes == 7


def test_three_parts_are_joined() -> None:
    llama = tiny_llama(num_hidden_layers=3)
    twin = copy.deepcopy(llama)
    for layer in twin.model.layers[:2]:
        layer.register_forward_hook(lambda layer, inputs, out: torch._dynamo.graph_break() if len(out[0]) > 1 else None)
    twin = compile_copy(twin)
    tokens = greedy(twin, prompt(40), 4, return_dict_in_generate=True)
    assert torch.equal(tokens.sequences, greedy(llama, prompt(40), 4))
    assert is_held(cache_of(tokens))
    assert sc.stats(twin).decodes == 3


@pytest.mark.one_process
class TestOneModel:
    """Of a prompt in two parts, whose steps and further turns are in one graph, or in two."""

    def caches(self, llama: LlamaForCausalLM) -> tuple[LlamaForCausalLM, Any, Any]:
        twin = broken(llama, "in the prompt")
        return twin, *(cache_of(step(model, prompt(50, 2))) for model in (twin, llama))

    @pytest.mark.slow
    def test_a_second_turn_parts_what_a_step_has_joined(self, llama: LlamaForCausalLM) -> None:
        twin, held, plain = self.caches(llama)
        for ids in (prompt(1, 2), prompt(9, 2, seed=5), prompt(1, 2, seed=6)):
            close(step(twin, ids, held), step(llama, ids, plain))
        assert is_held(held)

    def test_parts_are_joined_after_their_edits(self, llama: LlamaForCausalLM) -> None:
        twin, held, plain = self.caches(llama)
        for cache in (held, plain):
            cache.crop(-7)
            cache.reorder_cache(torch.tensor([1, 1]))
        close(step(twin, prompt(1, 2), held), step(llama, prompt(1, 2), plain))

    def test_a_copy_of_parts_goes_its_own_way(self, llama: LlamaForCausalLM) -> None:
        twin, held, plain = self.caches(llama)
        fork = copy.deepcopy(held)
        for cache, other, seed in ((held, copy.deepcopy(plain), 3), (fork, plain, 4)):
            for ids in (prompt(1, 2, seed=seed), prompt(1, 2, seed=9)):
                close(step(twin, ids, cache), step(llama, ids, other))

    def test_a_plain_copy_has_all_parts(self, llama: LlamaForCausalLM) -> None:
        _, held, plain = self.caches(llama)
        for ours, theirs in zip(sc.materialize(held).layers, plain.layers, strict=True):
            torch.testing.assert_close((ours.keys, ours.values), (theirs.keys, theirs.values), atol=1e-4, rtol=1e-4)

    def test_an_uncompiled_model_goes_on_from_parts_that_were_joined(self, llama: LlamaForCausalLM) -> None:
        twin, held, plain = self.caches(llama)
        close(step(twin, prompt(1, 2), held), step(llama, prompt(1, 2), plain))
        with pytest.warns(sc.SpecacheWarning, match="became plain"):
            got = step(llama, prompt(1, 2), held)
        close(got, step(llama, prompt(1, 2), plain))

    def test_a_step_that_failed_can_be_taken_again(
        self, llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its held tensors are those of the parts still."""
        twin, held, plain = self.caches(llama)
        with monkeypatch.context() as patch:
            patch.setattr("specache_compile.runtime.step.Step.run_graph", interrupt)
            with pytest.raises(KeyboardInterrupt):
                step(twin, prompt(1, 2), held)
        close(step(twin, prompt(1, 2), held), step(llama, prompt(1, 2), plain))

    def test_a_view_from_before_they_were_joined_is_stale(self, llama: LlamaForCausalLM) -> None:
        twin, held, _ = self.caches(llama)
        old = copy.copy(held)
        old.layers = [copy.copy(layer) for layer in held.layers]
        step(twin, prompt(1, 2), held)
        with pytest.raises(sc.HeldTensorError, match="deepcopy"):
            step(twin, prompt(1, 2), old)

    def test_a_part_of_another_cache_is_refused(self, llama: LlamaForCausalLM) -> None:
        twin, held, _ = self.caches(llama)
        step(twin, prompt(1, 2), held)
        other = cache_of(step(twin, prompt(1, 2), cache_of(step(twin, prompt(50, 2, seed=8)))))
        held.layers[1] = other.layers[1]
        with pytest.raises(sc.SpecacheError, match="different caches"):
            step(twin, prompt(1, 2), held)

    def test_the_tiers_count_every_part(self, llama: LlamaForCausalLM) -> None:
        twin, held, _ = self.caches(llama)
        part = session_of(held).statistics.bytes_by_tier["host"]
        step(twin, prompt(1, 2), held)
        assert session_of(held).statistics.bytes_by_tier["host"] == 2 * part


def interrupt(*arguments: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_parts_that_were_given_unlike_bits_say_so(llama: LlamaForCausalLM) -> None:
    """An eviction's budget may depend on the part."""
    twin = broken(llama, "in the prompt")
    cache = cache_of(step(twin, prompt(50)))
    part = cache.layers[1].keys.handle.session
    part.tiers.options = dataclasses.replace(part.options, bits=8)
    with pytest.raises(sc.SpecacheError, match=r"have different options \(bits 1 and 8\). Remove the break"):
        step(twin, prompt(1), cache)


@pytest.mark.quick_for("in the prompt")
@pytest.mark.parametrize("where", BREAKS)
@pytest.mark.slow
def test_parts_are_not_drafted_for_and_say_so(llama: LlamaForCausalLM, where: str) -> None:
    """A draft marks one session's steps: those of a cache in parts would go on exact, or half of them would."""
    twin = compile_copy(hooked(llama, where), verify=3)
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
        for projection in (
            layer.self_attn.q_proj,
            layer.self_attn.k_proj,
            layer.self_attn.v_proj,
            layer.self_attn.o_proj,
        ):
            projection.forward = torch.compiler.disable(projection.forward)
    return twin


def test_a_graph_of_attention_alone_is_counted_with_its_model() -> None:
    llama = tiny_llama(num_hidden_layers=1)
    first, second = compile_copy(attention_alone(llama)), compile_copy(attention_alone(llama))
    assert torch.equal(greedy(first, prompt(40), 4), greedy(llama, prompt(40), 4))
    greedy(second, prompt(40), 6)
    assert (sc.stats(first).decodes, sc.stats(second).decodes) == (3, 5)
