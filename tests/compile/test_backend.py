"""Options, errors, and graphs that stay as Hugging Face wrote them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, QuantizedCache

import specache_compile as sc
from conftest import LOSSLESS, compile_copy, greedy, prompt, step, tiny_llama
from specache_compile.compat import cache_of, with_cache
from specache_compile.passes import pipeline
from specache_compile.passes.pipeline import PIPELINE
from specache_compile.runtime.records import find_record


@pytest.fixture
def llama() -> LlamaForCausalLM:
    """One layer is enough for these tests, and is traced in two thirds of the time."""
    return tiny_llama(num_hidden_layers=1)


def test_a_bad_option_reaches_the_person_through_torch_compile(llama: LlamaForCausalLM) -> None:
    with pytest.raises(sc.OptionError, match="bits=3"):
        greedy(compile_copy(llama, bits=3), prompt(5), 2)


def test_passes_are_dumped_before_and_after_and_leave_structured_traces_for_tlparse(
    llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []

    def record(kind: str, metadata_fn: Any, payload_fn: Any) -> None:
        seen.append((metadata_fn()["name"], payload_fn()))

    monkeypatch.setattr(pipeline, "trace_structured", record)
    monkeypatch.setenv("SPECACHE_DUMP", str(tmp_path))
    greedy(compile_copy(llama), prompt(40), 3)
    phases = {folder.name.split(".")[1]: sorted(p.name for p in folder.iterdir()) for folder in tmp_path.glob("*.*")}
    assert set(phases) == {"prefill", "pre-decode", "decode"}
    expected = ["00_captured.py", *(f"{i:02d}_{step.__name__}.py" for i, step in enumerate(PIPELINE, 1))]
    assert all(files == expected for files in phases.values())
    decode = next(folder for folder in tmp_path.iterdir() if folder.name.endswith(".decode"))
    assert "scaled_dot_product_attention" in (decode / "00_captured.py").read_text()
    assert "specache.decode_attention" in (decode / "02_rewrite_attention.py").read_text()
    assert any(name.endswith("decode_02_rewrite_attention") for name, _ in seen)
    assert all("def forward" in payload for _, payload in seen)


@pytest.mark.parametrize("kind", ["static", "absent", "quantised"])
def test_another_kind_of_cache_is_left_alone_with_a_warning(llama: LlamaForCausalLM, kind: str) -> None:
    if kind == "quantised" and "fp8" not in (QuantizedCache.__doc__ or ""):
        pytest.skip("this transformers has no fp8 QuantizedCache, and quanto and hqq are not installed")
    how: dict[str, Callable[[], dict[str, Any]]] = {
        "static": lambda: {"cache_implementation": "static"},
        "absent": lambda: {"use_cache": False},
        "quantised": lambda: with_cache(QuantizedCache("fp8", llama.config)),
    }
    twin = compile_copy(llama)
    with pytest.warns(sc.SpecacheWarning, match="use DynamicCache"):
        tokens = greedy(twin, prompt(60), 20, **how[kind]())
    with pytest.raises(sc.SpecacheError, match=r"every attention stays exact: 1 .* its keys or values"):
        sc.stats(twin)
    assert torch.equal(tokens, greedy(llama, prompt(60), 20, **(how[kind]() if kind == "quantised" else {})))


def test_with_gradients_the_graph_is_left_alone_and_gradients_are_right(llama: LlamaForCausalLM) -> None:
    twin = compile_copy(llama).train()
    with pytest.warns(sc.SpecacheWarning, match=r"torch.no_grad\(\)"):
        twin(prompt(50), labels=prompt(50)).loss.backward()
    llama.train()(prompt(50), labels=prompt(50)).loss.backward()
    torch.testing.assert_close(twin.lm_head.weight.grad, llama.lm_head.weight.grad)


def test_a_held_cache_under_gradients_is_refused(llama: LlamaForCausalLM) -> None:
    twin = compile_copy(llama)
    cache = cache_of(step(twin, prompt(50)))
    refused = pytest.raises(sc.SpecacheError, match=r"gradients are enabled.*torch.no_grad\(\)")
    with pytest.warns(sc.SpecacheWarning), refused:
        twin(prompt(1), **with_cache(cache))


@pytest.mark.quick_for("sdpa")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_refusal_comes_as_it_is_in_every_call_and_costs_nothing(attention: str) -> None:
    """Not inside Dynamo's BackendCompilerFailed; the cache is unchanged afterwards."""
    llama = tiny_llama(num_hidden_layers=1, attn_implementation=attention)
    twin = compile_copy(llama)
    cache = cache_of(step(twin, prompt(50)))
    errors = []
    for _ in range(2):
        with pytest.raises(sc.SpecacheError, match=r"held by the specache backend.*materialize") as raised:
            step(twin, prompt(1), cache, output_attentions=True)
        errors.append(raised.value)
    assert errors[0] is not errors[1]
    assert all(type(error) is sc.SpecacheError and error.__cause__ is error.__context__ is None for error in errors)
    expected = step(llama, prompt(1), cache_of(step(llama, prompt(50)))).logits
    torch.testing.assert_close(step(twin, prompt(1), cache).logits, expected, atol=1e-3, rtol=1e-4)


@torch.inference_mode()
def test_inference_mode(llama: LlamaForCausalLM) -> None:
    logits = []
    for model in (compile_copy(llama), llama):
        out = model(prompt(90), use_cache=True)
        for _ in range(12):
            out = model(out.logits[:, -1:].argmax(-1), **with_cache(cache_of(out)))
        logits.append(out.logits)
    torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-4)


def test_custom_4d_masks_are_applied(llama: LlamaForCausalLM) -> None:
    """In every phase: a hole in the context, given as an additive mask."""
    lowest = torch.finfo(torch.float32).min
    mask = torch.zeros(1, 1, 60, 60).masked_fill(torch.ones(60, 60).triu(1).bool(), lowest)
    mask[..., 20:, 5:9] = lowest
    later = torch.zeros(1, 1, 1, 61)
    later[..., 5:9] = lowest
    extend = torch.zeros(1, 1, 3, 64).masked_fill(torch.ones(3, 64).triu(62).bool(), lowest)

    def run(model: LlamaForCausalLM) -> list[torch.Tensor]:
        one = step(model, prompt(60), attention_mask=mask)
        two = step(model, prompt(1), cache_of(one), attention_mask=later)
        three = step(model, prompt(3), cache_of(two), attention_mask=extend)
        return [one.logits, two.logits, three.logits]

    torch.testing.assert_close(run(compile_copy(llama)), run(llama), atol=1e-3, rtol=1e-4)


def test_without_token_ids_one_lane_runs_and_report_and_warning_have_the_reason(llama: LlamaForCausalLM) -> None:
    """A step on vectors makes no speculative token; the next step on ids needs one, and makes it first."""
    twin = compile_copy(llama)
    vectors = llama.get_input_embeddings().weight.detach()[prompt(62)]
    embedded, token = [{"inputs_embeds": vectors[:, n, None]} for n in (60, 61)], {"input_ids": prompt(1, seed=4)}

    def run(model: LlamaForCausalLM) -> torch.Tensor:
        with torch.no_grad():
            cache = cache_of(model(inputs_embeds=vectors[:, :60], use_cache=True))
            steps = [model(**given, **with_cache(cache)).logits for given in (*embedded, token, embedded[0], token)]
        return torch.cat(steps, 1)

    with warnings.catch_warnings(record=True, action="always", category=sc.SpecacheWarning) as seen:
        logits = run(twin)
    torch.testing.assert_close(logits, run(llama), atol=1e-3, rtol=1e-4)
    (message,) = [str(warning.message) for warning in seen if warning.category is sc.SpecacheWarning]
    assert "one token at a time" in message
    assert "no token ids come in" in message
    reasons = [made.one_lane for graph in find_record(twin).graphs for made in graph.rewrites.made.values()]
    assert "no token ids come in" in str(reasons)


def test_a_cache_that_an_uncompiled_model_filled_stays_plain(llama: LlamaForCausalLM) -> None:
    cache = cache_of(step(llama, prompt(60)))
    expected = step(llama, prompt(1), copy.deepcopy(cache)).logits
    with pytest.warns(sc.SpecacheWarning, match="filled by an uncompiled model"):
        logits = step(compile_copy(llama), prompt(1), cache).logits
    torch.testing.assert_close(logits, expected)


def test_a_graph_that_serves_two_models_counts_for_each(llama: LlamaForCausalLM) -> None:
    """Dynamo guards on a model's class and shapes: copies that are compiled alike share their graphs."""
    one, two = compile_copy(llama), compile_copy(llama)
    greedy(one, prompt(40), 3)
    greedy(two, prompt(40), 6)
    assert (sc.stats(one).decodes, sc.stats(two).decodes) == (2, 5)


def test_stats_are_those_of_the_newest_options_and_report_a_cache_larger_than_in_16_bits() -> None:
    model = tiny_llama()
    for exact in ([0], []):
        model.compile(backend="specache", options={**LOSSLESS, "exact_layers": exact})
        greedy(model, prompt(40), 3)
        stats = sc.stats(model)
        assert sum(stats.left_exact.values()) == len(exact)
    assert stats.kv_ratio > 1
    assert "more device memory than a 16-bit cache" in str(stats)


def test_stats_count_steps_and_bytes_and_before_the_first_step_state_what_to_do() -> None:
    twin = compile_copy(tiny_llama(), top_k=16)
    with pytest.raises(sc.SpecacheError, match=r"compile\(backend='specache'\)"):
        sc.stats(twin)
    greedy(twin, prompt(200), 20)
    stats = sc.stats(twin)
    assert (stats.prefills, stats.pre_decodes, stats.decodes, stats.extends) == (1, 1, 19, 0)
    pair = 2 * 2 * 16 * 4  # layers are counted one by one: K and V of 2 heads of 16 channels in float32
    assert stats.bytes_to_host == 2 * (200 + 19) * pair
    assert 0 < stats.bytes_to_device <= 2 * 20 * 16 * pair
