"""Reasons for attentions that are left alone describe the model at hand."""

from __future__ import annotations

import operator
import warnings
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
import transformers

import specache_compile as sc
from conftest import LOSSLESS, greedy, prompt
from families import BY_NAME, Family
from graphs import BATCH, DIM, HEADS, PAST, GraphBuilder, attention, found
from specache_compile.compat import release
from specache_compile.compile.captured import without_misfits
from specache_compile.methods import parse_options
from specache_compile.passes import speculate
from specache_compile.passes.reading.attention_forms import NoMatch, match_form

COMPUTED = "computed from what the cache keeps"
LEFT = {
    "diffllama": (Family("diffllama", "DiffLlamaConfig", {"num_hidden_layers": 1}), COMPUTED),
    "bloom": (Family("bloom", "BloomConfig", {"n_head": 4, "n_layer": 1}), "in none of the forms that are known"),
}


def warnings_of(family: Family, tokens: int) -> list[str]:
    """Return the warnings of a generation, whose tokens must equal the uncompiled model's."""
    model = family.model()
    model.compile(backend="specache", options=LOSSLESS)
    with warnings.catch_warnings(record=True, action="always") as seen:
        made = greedy(model, prompt(20), tokens)
    assert torch.equal(made, greedy(family.model(), prompt(20), tokens))
    return [str(warning.message) for warning in seen if warning.category is sc.SpecacheWarning]


@pytest.mark.parametrize("name", LEFT)
def test_a_model_with_the_default_cache_and_attention_gets_no_advice_to_use_them(name: str) -> None:
    family, reason = LEFT[name]
    (message,) = warnings_of(family, 1)
    assert reason in message
    assert "DynamicCache" not in message


WINDOW = {"sliding_window": 8}
TYPES = {"layer_types": ["sliding_attention", "full_attention"]}


def test_a_model_of_sliding_windows_alone_warns_once_and_at_the_callers_line() -> None:
    """Its prefill, its decode and a batch are graphs of their own."""
    model = Family("mistral", "MistralConfig", {**WINDOW, "num_hidden_layers": 1}).model()
    model.compile(backend="specache", options=LOSSLESS)
    with warnings.catch_warnings(record=True, action="always") as seen:
        for rows in (1, 2):
            model.generate(prompt(20, rows), max_new_tokens=3, do_sample=False)
    (warning,) = [one for one in seen if one.category is sc.SpecacheWarning]
    assert "sliding window" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.filterwarnings("error::specache_compile.SpecacheWarning")
def test_a_sliding_window_beside_a_rewritten_attention_is_information(logged: list[str]) -> None:
    model = Family("gemma2", "Gemma2Config", {**WINDOW, **TYPES}).model()
    model.compile(backend="specache", options={**LOSSLESS, "speculate": False})
    greedy(model, prompt(20), 3)
    assert "rewrote 1 attentions of a graph and left 1 exact" in str(logged)
    ((reason, count),) = sc.stats(model).left_exact.items()
    assert "sliding window" in reason
    assert count == 1
    assert reason in str(sc.stats(model))


def test_a_window_that_keeps_its_past_for_assisted_decoding_is_reported_as_a_window() -> None:
    """Such a layer stores the whole update, and its attention reads the update's newest tokens."""
    builder = GraphBuilder()
    out, keys, values = attention(builder, 0, 1, PAST)
    newest = (slice(None), slice(None), slice(-4, None), slice(None))
    read = {node: builder.call(operator.getitem, (BATCH, HEADS, 4, DIM), node, newest) for node in (keys, values)}
    again = builder.graph.node_copy(out, lambda node: read.get(node, node))
    out.replace_all_uses_with(again)
    builder.graph.erase_node(out)
    assert "sliding window" in found(builder, builder.finish(again, keys, values)).left_alone[0].reason


def test_keys_copied_into_the_graphs_memory_still_come_from_the_cache() -> None:
    """Latent attention fills its keys in place: following arguments alone ends at the empty tensor."""
    builder = GraphBuilder()
    out, keys, values = attention(builder, 0, 1, PAST)
    own = builder.call(torch.empty, (BATCH, HEADS, PAST + 1, DIM), (BATCH, HEADS, PAST + 1, DIM))
    half = builder.call(torch.narrow, (), own, 3, 0, DIM // 2)
    half.meta["example_value"] = own.meta["example_value"].narrow(3, 0, DIM // 2)
    read = builder.call(torch.narrow, (BATCH, HEADS, PAST + 1, DIM // 2), keys, 3, 0, DIM // 2)
    builder.call(torch.Tensor.copy_, (BATCH, HEADS, PAST + 1, DIM // 2), half, read)
    again = builder.graph.node_copy(out, lambda node: own if node is keys else node)
    out.replace_all_uses_with(again)
    builder.graph.erase_node(out)
    assert COMPUTED in found(builder, builder.finish(again, keys, values)).left_alone[0].reason


@pytest.mark.parametrize("used", [True, False])
def test_a_past_may_be_read_for_its_size_if_no_output_depends_on_it(used: bool) -> None:
    """mllama reads the size to test whether there is a past."""
    builder = GraphBuilder()
    out, keys, values = attention(builder, 0, 1, PAST)
    past = next(node for node in builder.graph.nodes if node.name == "past_k0")
    many = builder.call(operator.gt, (), builder.call(torch.numel, (), past), 0)
    read = found(builder, builder.finish(out, keys, values, *([many] if used else [])))
    assert [item.reason for item in read.left_alone] == (["its past past_k0 is read elsewhere too"] if used else [])


def test_a_mask_made_of_cached_values_is_left_alone() -> None:
    """doge computes its mask from values, which held tensors do not provide."""
    messages = warnings_of(Family("doge", "DogeConfig", {"num_hidden_layers": 1}), 2)
    assert messages
    assert all("its mask is computed from the keys or values that its cache keeps" in one for one in messages)


def test_gpt2s_eager_attention_is_known() -> None:
    """GPT-2 casts its weights by `type`."""
    settings = {"n_embd": 64, "n_layer": 1, "n_head": 4, "attn_implementation": "eager"}
    assert warnings_of(Family("gpt2", "GPT2Config", settings), 2) == []


CODEGEN = BY_NAME["codegen"].one_layer


def test_a_mask_may_be_scaled_with_the_scores_where_it_only_hides() -> None:
    """codegen adds the mask and then divides; it runs one lane, like gptj."""
    (message,) = warnings_of(CODEGEN, 4)
    assert "one token at a time" in message


@pytest.mark.skipif(release(transformers) >= (5, 24), reason="CodeGen scales its scores before it adds the mask")
def test_a_scaled_mask_with_finite_weights_is_left_alone() -> None:
    model = CODEGEN.model()
    ids, weighed = prompt(20), torch.randn(1, 1, 20, 20)
    expected = model(ids, attention_mask=weighed).logits
    model.compile(backend="specache", options=LOSSLESS)
    with torch.no_grad(), pytest.warns(sc.SpecacheWarning, match="its mask is scaled with its scores"):
        torch.testing.assert_close(model(ids, attention_mask=weighed).logits, expected)


@pytest.mark.parametrize("steps", ["mask scale mask", "scale cap mask scale", "mask negate"])
def test_no_further_operation_matches_after_a_scaled_mask(steps: str) -> None:
    builder = GraphBuilder()
    queries, keys = (builder.input(name, BATCH, HEADS, PAST, DIM) for name in "qk")
    mask, shape = builder.input("mask", BATCH, 1, PAST, PAST), (BATCH, HEADS, PAST, PAST)
    turned = builder.call(torch.transpose, (BATCH, HEADS, DIM, PAST), keys, -2, -1)
    scores = builder.call(torch.matmul, shape, queries, turned)
    for step in steps.split():
        if step == "cap":
            scores = builder.call(torch.tanh, shape, builder.call(torch.div, shape, scores, 2.0))
        other = {"mask": mask, "scale": 0.5, "cap": 2.0, "negate": -1.0}[step]
        scores = builder.call(torch.add if step == "mask" else torch.mul, shape, scores, other)
    weights = builder.call(torch.softmax, shape, scores, -1)
    with pytest.raises(NoMatch, match="in an order that is not known"):
        match_form(builder.call(torch.matmul, (BATCH, HEADS, PAST, DIM), weights, keys))


def test_a_graph_that_vmap_refuses_runs_one_lane_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculate, "run_lanes", Mock(side_effect=RuntimeError("vmap: no such thing\nat all")))
    (message,) = warnings_of(Family("llama", "LlamaConfig", {"num_hidden_layers": 1}), 3)
    assert "torch.vmap refuses its graph (vmap: no such thing)" in message


@pytest.mark.parametrize("before_a_graph_break", [False, True])
def test_a_mask_that_selects_pairs_by_token_needs_the_tokens_own_selection(before_a_graph_break: bool) -> None:
    """An indexer adds its selection to the mask, and the previous token's selection differs."""
    builder, shape = GraphBuilder(), (BATCH, 1, 1, PAST + 1)
    out, keys, values = attention(builder, 0, 1, PAST)
    masks = [builder.input(name, *shape) for name in ("mask", "selected")]
    for mask in masks:
        mask.meta["example_value"] = mask.meta["example_value"].bool()
    hidden, weight = builder.input("hidden", BATCH, 1, 1, DIM), builder.input("weight", PAST + 1, DIM)
    with builder.graph.inserting_before(out):
        linear = F.linear, shape, hidden, weight
        mask = builder.call(*((operator.and_, shape, *masks) if before_a_graph_break else linear))
    out.kwargs = {**out.kwargs, "attn_mask": mask}
    read = found(builder, builder.finish(out, keys, values))
    served = without_misfits(read, parse_options({"setting": "paper"}))
    assert not served.sites
    assert "(an indexer)" in served.left_alone[-1].reason
    assert without_misfits(read, parse_options({"bits": 16})).sites == read.sites
