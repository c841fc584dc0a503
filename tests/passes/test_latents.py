"""Latent attention: how it matches, what it becomes, and that results stay the same."""

from __future__ import annotations

import operator
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule
from transformers import DynamicCache

import specache_compile as sc
from conftest import eager, greedy, prompt, step
from families import BY_NAME, FAMILIES, Family
from graphs import BATCH, PAST, GraphBuilder, found, text
from specache_compile.compat import cache_of, with_cache
from specache_compile.passes.absorb import absorb, softmax
from specache_compile.passes.reading.joined_copies import joined_copies
from specache_compile.runtime.records import find_record

RANK, ROPE, NOPE, VALUE, QUERY_HEADS = 6, 4, 4, 8, 2
LATENT = [family for family in FAMILIES if family.absorbed]
TWO_LAYERS = BY_NAME["deepseek_v3"]
MODEL = TWO_LAYERS.one_layer


def latent_graph(past: int) -> tuple[GraphBuilder, GraphModule]:
    """Return one attention in transformers' form after `joined_copies`: keys are a projection of latents and RoPE."""
    builder, n, wide = GraphBuilder(), past + 1, NOPE + VALUE
    weight = builder.input("weight", QUERY_HEADS * wide, RANK)
    q = builder.input("q", BATCH, QUERY_HEADS, 1, NOPE + ROPE)
    updates = []
    for name, width in (("latent", RANK), ("rope", ROPE)):
        new = builder.input(name, BATCH, 1, 1, width)
        before = builder.input(f"past_{name}", BATCH, 1, past, width) if past else builder.call(torch.tensor, (0,), [])
        updates.append(builder.call(torch.cat, (BATCH, 1, n, width), [before, new], dim=-2))
    linear = builder.call(F.linear, (BATCH, 1, n, QUERY_HEADS * wide), updates[0], weight)
    heads = builder.call(torch.reshape, (BATCH, n, QUERY_HEADS, wide), linear, (BATCH, n, -1, wide))
    heads.target, heads.op = "view", "call_method"
    both = builder.call(torch.transpose, (BATCH, QUERY_HEADS, n, wide), heads, 1, 2)
    split = builder.graph.call_function(torch.functional.split, (both, [NOPE, VALUE]), {"dim": -1})
    nope, values = (
        builder.call(operator.getitem, (BATCH, QUERY_HEADS, n, width), split, number)
        for number, width in enumerate((NOPE, VALUE))
    )
    ropes = builder.call(torch.Tensor.expand, (BATCH, QUERY_HEADS, n, ROPE), updates[1], -1, QUERY_HEADS, -1, -1)
    ropes.target, ropes.op = "expand", "call_method"
    keys = builder.call(torch.cat, (BATCH, QUERY_HEADS, n, NOPE + ROPE), [nope, ropes], -1)
    out = builder.call(
        F.scaled_dot_product_attention, (BATCH, QUERY_HEADS, 1, VALUE), q, keys, values, attn_mask=None, scale=0.25
    )
    return builder, builder.finish(out, *updates)


def test_an_absorbed_step_computes_what_the_attention_computes() -> None:
    """In double precision, except for the softmax; it projects no cached latent to keys and values."""
    builder, graph_module = latent_graph(PAST)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(node.meta["example_value"].shape, generator=generator, dtype=torch.float64)
        for node in graph_module.graph.find_nodes(op="placeholder")
    ]
    graph_module.recompile()
    expected = graph_module(*inputs)
    read = found(builder, graph_module)
    assert (read.sites, read.left_alone) == ((), ())
    assert len(absorb(graph_module, read.latents)) == 1
    products = re.findall(r"= einsum\((.+?), ", text(graph_module))
    assert products == [
        "bhtn,hnr->bhtr", "bhtr,bsr->bhts", "bhtr,bsr->bhts", "bhts,bsr->bhtr", "bhtr,hvr->bhtv",
    ]  # fmt: skip
    assert not re.search("= (linear|scaled_dot_product_attention)", text(graph_module))
    for ours, theirs in zip(graph_module(*inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_several_new_tokens_keep_hugging_faces_form() -> None:
    builder, graph_module = latent_graph(PAST)
    (latents,) = found(builder, graph_module).latents
    latents.q.meta["example_value"] = builder.value(BATCH, QUERY_HEADS, 2, NOPE + ROPE)
    before = text(graph_module)
    assert absorb(graph_module, (latents,)) == ()
    assert text(graph_module) == before


def test_a_softmax_masks_by_booleans_and_by_numbers() -> None:
    scores, mask = torch.randn(2, 3, 1, 5), torch.tensor([True, False, True, True, False]).expand(2, 1, 1, 5)
    expected = torch.softmax((2 * scores)[..., mask[0, 0, 0]], -1)
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    for given in (mask, added):
        weights = softmax(scores, given, 2.0)
        torch.testing.assert_close(weights[..., mask[0, 0, 0]], expected)
        assert not weights[..., ~mask[0, 0, 0]].any()


def filled_by_copies(scaled_meanwhile: bool) -> GraphModule:
    """Return -cat([a, b], -1) of a tensor that is filled in place; or with a doubled in place after each copy."""
    builder = GraphBuilder()
    parts = [builder.input(name, 2, width) for name, width in (("a", 3), ("b", 5))]
    empty = builder.graph.call_method("new_empty", (parts[0], 2, 8))
    empty.meta["example_value"] = builder.value(2, 8)
    for part, where in zip(parts, (slice(None, 3), slice(3, None)), strict=True):
        view = builder.call(operator.getitem, tuple(part.meta["example_value"].shape), empty, (Ellipsis, where))
        builder.graph.call_method("copy_", (view, part))
        if scaled_meanwhile:
            builder.graph.call_method("mul_", (parts[0], 2))
    return builder.finish(builder.call(torch.neg, (2, 8), empty))


def test_copies_that_fill_a_tensor_are_its_concatenation() -> None:
    graph_module = filled_by_copies(scaled_meanwhile=False)
    assert joined_copies(graph_module) == 1
    a, b = torch.randn(2, 3), torch.randn(2, 5)
    assert torch.equal(graph_module(a, b)[0], -torch.cat([a, b], -1))
    assert "copy_" not in graph_module.code


def test_a_tensor_that_is_read_before_it_is_full_stays() -> None:
    builder = GraphBuilder()
    part = builder.input("a", 2, 3)
    empty = builder.graph.call_method("new_empty", (part, 2, 8))
    empty.meta["example_value"] = builder.value(2, 8)
    view = builder.call(operator.getitem, (2, 3), empty, (Ellipsis, slice(None, 3)))
    builder.graph.call_method("copy_", (view, part))
    assert joined_copies(builder.finish(empty)) == 0


def test_a_source_that_is_written_between_copies_is_not_joined() -> None:
    assert joined_copies(filled_by_copies(scaled_meanwhile=True)) == 0


def test_keys_of_two_parts_that_are_no_latents_are_reported_without_a_crash() -> None:
    builder = GraphBuilder()
    q, nope, rope, v = (builder.input(name, BATCH, QUERY_HEADS, 1, 4) for name in ("q", "nope", "rope", "v"))
    keys = builder.call(torch.cat, (BATCH, QUERY_HEADS, 1, 8), [nope, rope], -1)
    out = builder.call(F.scaled_dot_product_attention, (BATCH, QUERY_HEADS, 1, 4), q, keys, v)
    assert len(found(builder, builder.finish(out)).left_alone) == 1


def compiled(family: Family = MODEL, **options: Any) -> Any:
    return eager(family.model(), **options)


@pytest.mark.quick_for("deepseek_v2")
@pytest.mark.parametrize("family", LATENT, ids=[family.name for family in LATENT])
def test_turns_of_a_padded_batch_give_the_uncompiled_models_logits(family: Family) -> None:
    """A prompt, steps, a second turn, and steps again; the second row is left-padded."""
    family = family.one_layer
    model, plain = compiled(family), family.model()
    caches = [DynamicCache(config=plain.config) for _ in range(2)]
    mask, token = torch.ones(2, 0, dtype=torch.int64), prompt(40, 2)
    for new in (token, None, None, prompt(5, 2, seed=3), None, None):
        token = token if new is None else new
        mask = torch.cat([mask, mask.new_ones(token.shape)], 1)
        mask[1, :13] = 0
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, -token.shape[1] :]
        ours, theirs = (
            step(one, token, cache, attention_mask=mask, position_ids=places).logits[:, -1]
            for one, cache in zip((model, plain), caches, strict=True)
        )
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
        token = theirs.argmax(-1, keepdim=True)
    assert find_record(model).absorbed == family.absorbed


def test_hold_copies_a_cache_of_latents() -> None:
    ids, model = prompt(90), compiled()
    plain = cache_of(step(MODEL.model(), ids[:, :-1]))
    held = sc.hold(plain, model)
    assert torch.equal(greedy(model, ids, 6, **with_cache(held)), greedy(MODEL.model(), ids, 6))
    assert plain.get_seq_length() == 89
    assert held.get_seq_length() == 95


def test_latents_are_reported_as_uncompressed() -> None:
    model = compiled()
    greedy(model, prompt(40), 3)
    with pytest.raises(sc.SpecacheError, match=r"rewritten \(absorbed\), but read.*not compressed"):
        sc.stats(model)
    explained = sc.explain(MODEL.model(), 300)
    assert explained.absorbed == ("0",)
    assert "1 of 1 attentions rewritten" in str(explained)
    assert "absorbed and exact; Hugging Face's own cache, nothing is compressed" in str(explained)


def test_a_projection_with_an_adapter_is_left_alone_with_a_reason() -> None:
    """A bias on the projection represents every projection that is no plain matrix."""
    builder, graph_module = latent_graph(PAST)
    (linear,) = graph_module.graph.find_nodes(op="call_function", target=F.linear)
    with graph_module.graph.inserting_before(linear):
        linear.args = (*linear.args, builder.input("bias", QUERY_HEADS * (NOPE + VALUE)))
    (left,) = found(builder, graph_module).left_alone
    assert "not one plain matrix" in left.reason


@pytest.mark.parametrize("options", [{"method": "full"}, {"verify": "auto"}], ids=str)
def test_options_of_tiers_change_no_token(options: dict[str, Any]) -> None:
    """With latents of an odd number of channels."""
    family = replace(MODEL, settings={**MODEL.settings, "kv_lora_rank": 31})
    model = compiled(family, **options)
    assert torch.equal(greedy(model, prompt(40), 4), greedy(family.model(), prompt(40), 4))


@pytest.mark.slow
def test_an_exact_layer_keeps_hugging_faces_form(logged: list[str]) -> None:
    model = compiled(TWO_LAYERS, exact_layers=(0,))
    assert torch.equal(greedy(model, prompt(40), 4), greedy(TWO_LAYERS.model(), prompt(40), 4))
    assert re.search("left 1 exact.*exact_layers lists attention 0", str(logged))
    assert find_record(model).absorbed == 1
