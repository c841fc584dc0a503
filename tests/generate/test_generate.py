"""What must work with `generate`: the compiled model gives the uncompiled model's tokens under lossless settings."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, pipeline

import specache_compile as sc
from conftest import LOSSLESS, compile_copy, greedy, left_padding, prompt, step, tiny_llama
from specache_compile.compat import cache_of

pytestmark = [pytest.mark.one_process, pytest.mark.one_trace]


@functools.cache
def uncompiled(length: int, tokens: int) -> torch.Tensor:
    """The uncompiled model's tokens for one prompt."""
    return greedy(tiny_llama(), prompt(length), tokens)


@pytest.mark.quick_for("settings0", "settings6")
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"bits": 2, "group_size": 64}, {"bits": 16, "top_k": 0}, {"bits": 16, "top_k": 8}, {"speculate": False},
        *({"residual_length": residual, "group_size": group} for residual, group in ((1, 64), (7, 128), (128, 32))),
    ],
)  # fmt: skip
def test_greedy_tokens_equal_for_200_tokens(llama: LlamaForCausalLM, settings: dict) -> None:
    """In two lanes, and in one; with windows of any size."""
    twin = compile_copy(llama, **settings)
    assert torch.equal(greedy(twin, prompt(75), 200), uncompiled(75, 200))


@pytest.mark.quick_for("1", "63", "257")
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 96, 257, 300])
def test_prompts_of_any_length(llama: LlamaForCausalLM, compiled: LlamaForCausalLM, length: int) -> None:
    """And on until tokens have left the recent tier (64)."""
    ids, new = prompt(length), 80 if length < 63 else 40
    assert torch.equal(greedy(compiled, ids, new), greedy(llama, ids, new))


@pytest.mark.parametrize("how", [{"temperature": 1.5, "top_k": 20}, {"num_beams": 3}], ids=["tokens", "beams"])
def test_sampling_with_a_seed(llama: LlamaForCausalLM, compiled: LlamaForCausalLM, how: dict[str, Any]) -> None:
    def sample(model: LlamaForCausalLM) -> torch.Tensor:
        torch.manual_seed(7)
        return model.generate(prompt(40, 2), max_new_tokens=30, do_sample=True, **how)

    assert torch.equal(sample(compiled), sample(llama))


@pytest.mark.filterwarnings("error::specache_compile.SpecacheWarning")
@pytest.mark.parametrize("bits", [1, 16])
def test_drafts_of_transformers(llama: LlamaForCausalLM, bits: int) -> None:
    """By prompt lookup, and by an assistant, which is compiled too or not."""
    twin, ids = compile_copy(llama, bits=bits), prompt(12).repeat(1, 6)
    expected, assistant = greedy(llama, ids, 40), tiny_llama(seed=5, num_hidden_layers=1)
    assert torch.equal(greedy(twin, ids, 40, prompt_lookup_num_tokens=4), expected)
    for either in (assistant, compile_copy(assistant)):
        assert torch.equal(greedy(twin, ids, 40, assistant_model=either), expected)


def test_a_left_padded_batch_after_batches_of_other_sizes(llama: LlamaForCausalLM, compiled: LlamaForCausalLM) -> None:
    """Dynamo has made the prompt's batch a symbol by then, and the mask's is a number."""
    for batch in (2, 3):
        greedy(compiled, prompt(20, batch), 2)
    ids = prompt(70, 4, 3)
    mask = left_padding(ids, 0, 37, 65, 20)
    expected = greedy(llama, ids, 40, attention_mask=mask)
    assert torch.equal(greedy(compiled, ids, 40, attention_mask=mask), expected)


def test_a_row_of_lossy_settings_does_not_depend_on_its_neighbours(llama: LlamaForCausalLM) -> None:
    twin = compile_copy(llama, top_k=8)
    alone = greedy(twin, prompt(90, 1, seed=11), 40)
    together = greedy(twin, torch.cat([prompt(90, 2, seed=12), prompt(90, 1, seed=11)]), 40)
    assert torch.equal(together[2:], alone)


def test_chunked_prefill(llama: LlamaForCausalLM, compiled: LlamaForCausalLM) -> None:
    ids = prompt(150)
    assert torch.equal(greedy(compiled, ids, 12, prefill_chunk_size=40), greedy(llama, ids, 12, prefill_chunk_size=40))


def test_bfloat16_logits_stay_within_rounding(llama: LlamaForCausalLM) -> None:
    """In bfloat16 ties are common, so tokens may differ. Logits agree as far as Hugging Face's own two paths do."""
    half = copy.deepcopy(llama).bfloat16()
    ids = prompt(120)

    def logits(model: LlamaForCausalLM) -> torch.Tensor:
        cache = cache_of(step(model, ids[:, :80]))
        return torch.cat([step(model, ids[:, t : t + 1], cache).logits for t in range(80, 120)], 1).float()

    exact = logits(copy.deepcopy(llama))
    ours, theirs = logits(compile_copy(half)), logits(half)
    assert (ours - exact).abs().mean() < 1.5 * (theirs - exact).abs().mean()


@pytest.mark.quick_for("torch.compile", "model.compile", "dynamic", "static")
@pytest.mark.parametrize("way", ["torch.compile", "model.compile", "forward", "fullgraph", "dynamic", "static", "mode"])
def test_ways_to_switch_it_on(llama: LlamaForCausalLM, way: str) -> None:
    twin = copy.deepcopy(llama)
    how: dict = {"backend": "specache", "options": LOSSLESS}
    if way == "torch.compile":
        model = torch.compile(twin, **how)
    elif way == "forward":
        model = twin
        model.forward = torch.compile(model.forward, **how)
    else:
        extra = {
            "fullgraph": {"fullgraph": True}, "dynamic": {"dynamic": True}, "static": {"dynamic": False},
            "mode": {"mode": "reduce-overhead"},
        }  # fmt: skip
        model = twin
        if way == "mode":
            how = {"backend": "specache"}
        model.compile(**how, **extra.get(way, {}))
    if way == "dynamic":  # which frees a batch of more than one
        assert torch.equal(greedy(model, prompt(60, batch=3), 12), greedy(llama, prompt(60, batch=3), 12))
        assert sc.stats(twin).pre_decodes == 1, "two lanes"
    elif way != "mode":
        assert torch.equal(greedy(model, prompt(60), 12), uncompiled(60, 12))
    else:
        greedy(model, prompt(60), 3)
    assert sc.stats(twin).decodes >= 2
    if way == "torch.compile":
        assert twin._compiled_call_impl is None, "the wrapped model itself must stay uncompiled"


def test_generation_from_embeddings_whose_positions_are_given(llama: LlamaForCausalLM) -> None:
    """`generate` passes positions beside them: two inputs of one batch and one length."""
    twin = compile_copy(llama)
    for rows, length in ((2, 60), (3, 45)):
        vectors = llama.get_input_embeddings()(prompt(length, rows)).detach()
        given = {"inputs_embeds": vectors, "max_new_tokens": 8, "do_sample": False}
        assert torch.equal(twin.generate(**given), llama.generate(**given))


def test_a_pipeline_runs_the_rewritten_graphs(llama: LlamaForCausalLM) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(128)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w0")
    text = " ".join(f"w{i}" for i in prompt(60)[0].tolist())

    def complete(model: object) -> str:
        generator = pipeline("text-generation", model=model, tokenizer=fast)
        return generator(text, max_new_tokens=30, do_sample=False)[0]["generated_text"]

    twin = copy.deepcopy(llama)
    assert complete(torch.compile(twin, backend="specache", options=LOSSLESS)) == complete(llama)
    assert sc.stats(twin).decodes > 0
