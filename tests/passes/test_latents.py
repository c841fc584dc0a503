"""Latent attention: how it is read, what it is rewritten to, and that nothing of a call's answer changes by it."""

from __future__ import annotations

import copy
import operator
from dataclasses import replace
from pathlib import Path
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from transformers import DynamicCache

import specache_compile as sc
from conftest import LOSSLESS, greedy, prompt
from families import FAMILIES
from graphs import BATCH, PAST, GraphBuilder, found, plan_for, text
from specache_compile.compat import with_cache
from specache_compile.compile.captured import misfit
from specache_compile.methods import every_method, parse_options
from specache_compile.passes.absorb import absorb
from specache_compile.passes.own_cache import own_cache
from specache_compile.passes.phase import DECODE, EXTEND, PREFILL
from specache_compile.passes.reading.joined_copies import joined_copies
from specache_compile.passes.reading.lane_rules import heads_times, heads_times_lanes
from specache_compile.runtime.held import HeldTensor
from specache_compile.runtime.records import find_record
from specache_compile.runtime.session import session_of

RANK, ROPE, NOPE, VALUE, QUERY_HEADS = 6, 4, 4, 8, 2
MODEL = next(family for family in FAMILIES if family.name == "deepseek_v3")


def latent_graph(past: int) -> tuple[GraphBuilder, GraphModule]:
    """One attention as transformers writes it, behind `joined_copies`: keys are what a latent's projection gives, and
    its RoPE part."""
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


class TestSnapshots(expecttest.TestCase):
    def test_absorb(self) -> None:
        builder, graph_module = latent_graph(PAST)
        plan = plan_for(builder, DECODE, graph_module)
        own_cache(graph_module, plan)
        absorb(graph_module, plan)
        graph_module.graph.eliminate_dead_code()
        self.assertExpectedInline(
            text(graph_module),
            """\
cat = cat([past_latent, latent])
cat_1 = cat([past_rope, rope])
key_half = key_half(weight, 2, 4)
value_half = value_half(weight, 2, 4)
channels = channels(q, 0, 4)
channels_1 = channels(q, 4, None)
heads_times = heads_times(channels, key_half)
cat_3 = cat([heads_times, channels_1], -1)
cat_4 = cat([cat, cat_1], -1)
over_rows = over_rows(cat_3, cat_4, None, 0.25)
channels_2 = channels(over_rows, 0, 6)
heads_times_1 = heads_times(channels_2, value_half)
return (heads_times_1, None, None)
""",
        )

    def test_a_prefill_keeps_its_keys(self) -> None:
        builder, graph_module = latent_graph(0)
        plan = plan_for(builder, PREFILL, graph_module)
        own_cache(graph_module, plan)
        absorb(graph_module, plan)
        (site,) = plan.sites
        assert site.attention.target is F.scaled_dot_product_attention
        assert site.k is site.v
        assert site.k.args == ([node("latent", graph_module), node("rope", graph_module)], -1)


def test_a_gpu_keeps_them_as_hugging_face_does_with_that_reason() -> None:
    builder, graph_module = latent_graph(PAST)
    (site,) = plan_for(builder, DECODE, graph_module).sites
    with FakeTensorMode():
        site.k.meta["example_value"] = torch.empty(BATCH, 1, 1, RANK, device="cuda")
    assert "rewritten on a CPU alone" in str(misfit(parse_options({}), site))


def test_an_extend_hands_the_projection_to_its_op() -> None:
    builder, graph_module = latent_graph(PAST)
    plan = plan_for(builder, EXTEND, graph_module)
    own_cache(graph_module, plan)
    absorb(graph_module, plan)
    (site,) = plan.sites
    assert site.k is site.v
    assert site.attention.target is F.scaled_dot_product_attention, "until `rewrite_attention`"


def node(name: str, graph_module: GraphModule) -> Node:
    return next(node for node in graph_module.graph.nodes if node.name == name)


def filled_by_copies(scaled_meanwhile: bool) -> GraphModule:
    """-cat([a, b], -1), of a tensor that is filled in place; or with a doubled in place behind each copy."""
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


def test_a_source_that_is_written_meanwhile_is_not_read_later() -> None:
    assert joined_copies(filled_by_copies(scaled_meanwhile=True)) == 0


def test_keys_of_two_parts_that_are_no_latents_are_told_and_no_crash() -> None:
    builder = GraphBuilder()
    q, nope, rope, v = (builder.input(name, BATCH, QUERY_HEADS, 1, 4) for name in ("q", "nope", "rope", "v"))
    keys = builder.call(torch.cat, (BATCH, QUERY_HEADS, 1, 8), [nope, rope], -1)
    out = builder.call(F.scaled_dot_product_attention, (BATCH, QUERY_HEADS, 1, 4), q, keys, v)
    assert len(found(builder, builder.finish(out)).left_alone) == 1


@pytest.mark.parametrize("x_dim", [0, 1, 3])
def test_a_product_by_heads_under_vmap(x_dim: int) -> None:
    """Each lane's is the product alone."""
    x, weight = torch.randn(3, 2, 4, 1, 5), torch.randn(4, 5, 6)
    expected = torch.stack([torch.einsum("bhtn,hnm->bhtm", lane, weight) for lane in x])
    out = torch.vmap(heads_times_lanes, (x_dim, None))(x.movedim(0, x_dim), weight)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(heads_times(x[0], weight), expected[0])


def compiled(**options: Any) -> Any:
    model = MODEL.model()
    model.compile(backend="specache", options={"lowering": "eager", **(options or LOSSLESS)})
    return model


def test_the_cache_has_hugging_faces_bytes_and_comes_back_bit_for_bit() -> None:
    ids, plain, cache = prompt(90), DynamicCache(), DynamicCache()
    model = compiled(method="full")
    with torch.no_grad():
        MODEL.model()(ids, **with_cache(plain), use_cache=True)
        model(ids, **with_cache(cache), use_cache=True)
    whole = sum(2 * (layer.keys.numel() + layer.values.numel()) for layer in plain.layers)  # 16 bits
    session = session_of(cache)
    assert session is not None
    assert isinstance(cache.layers[0].keys, HeldTensor)
    assert session.statistics.full_cache_bytes == whole
    for ours, theirs in zip(sc.materialize(cache).layers, plain.layers, strict=True):
        torch.testing.assert_close((ours.keys, ours.values), (theirs.keys, theirs.values))


def test_a_plain_cache_is_taken_over_and_saved(tmp_path: Path) -> None:
    """A second turn behind a cache that the uncompiled model filled, saved and loaded, says what that model does."""
    ids, plain = prompt(90), DynamicCache()
    with torch.no_grad():
        MODEL.model()(ids[:, :-1], **with_cache(plain), use_cache=True)
    model = compiled()
    greedy(model, ids, 2)
    sc.save(sc.hold(plain, model), tmp_path)
    out = model.generate(ids, **with_cache(sc.load(tmp_path, model)), max_new_tokens=12, do_sample=False)
    assert torch.equal(out, greedy(MODEL.model(), ids, 12))


def test_crops_and_forks_go_on_as_the_uncompiled_model_does() -> None:
    ids, model = prompt(120), compiled()
    cache = DynamicCache()
    with torch.no_grad():
        model(ids, **with_cache(cache), use_cache=True)
    fork = copy.deepcopy(cache)
    cache.crop(70 - 120)
    for held, before in ((cache, 70), (fork, 120)):
        again = torch.cat([ids[:, :before], prompt(9)], 1)
        out = model.generate(again, **with_cache(held), max_new_tokens=6, do_sample=False)
        assert torch.equal(out, greedy(MODEL.model(), again, 6))


def test_an_indexers_mask_is_followed_where_each_token_chooses_its_own_pairs() -> None:
    family = next(family for family in FAMILIES if family.name == "deepseek_v32")
    model, ids = family.model(), prompt(120)
    options = {"bits": 1, "top_k": 1024, "host_bits": 16, "group_size": 32, "residual_length": 32, "lowering": "eager"}
    model.compile(backend="specache", options=options)
    assert torch.equal(greedy(model, ids, 12), greedy(family.model(), ids, 12))
    (graph, *_) = find_record(model).graphs
    assert len(graph.captured.sites) == 2


@pytest.mark.quick_for("kcache")
@pytest.mark.parametrize("method", [name for name, method in every_method().items() if not method.takes_latents])
def test_what_tells_keys_from_values_stays_exact_with_that_reason(method: str) -> None:
    model = compiled(method=method)
    with pytest.warns(sc.SpecacheWarning, match="a latent is both"):
        out = greedy(model, prompt(40), 4)
    assert torch.equal(out, greedy(MODEL.model(), prompt(40), 4))


def test_fp8_keeps_rows_too() -> None:
    """A step's logits are off by no more than e4m3's three bits of mantissa make of them, and not by nothing."""
    ids, cache, model = prompt(120), DynamicCache(), compiled(method="fp8")
    with torch.no_grad():
        expected = MODEL.model()(ids).logits[:, -1]
        model(ids[:, :-9], **with_cache(cache), use_cache=True)
        model(ids[:, -9:-1], **with_cache(cache), use_cache=True)
        logits = model(ids[:, -1:], **with_cache(cache), use_cache=True).logits[:, -1]
    assert isinstance(cache.layers[0].keys, HeldTensor)
    assert 1e-3 < float((logits - expected).norm() / expected.norm()) < 0.3


def of_width(rank: int, rope: int, **options: Any) -> tuple[Any, Any]:
    """A model whose rows have rank + rope channels, rotated and with every pair fetched; and the uncompiled one."""
    family = replace(MODEL, settings={**MODEL.settings, "kv_lora_rank": rank, "qk_rope_head_dim": rope})
    model = family.model()
    given = {"rotate": True, "top_k": 256, "host_bits": 16, "group_size": 32, "residual_length": 32, **options}
    model.compile(backend="specache", options={"lowering": "eager", **given})
    return model, family.model()


def test_rows_of_34_channels_are_rotated_in_blocks_of_two() -> None:
    ids, (model, plain) = prompt(90), of_width(30, 4, bits=4)
    assert torch.equal(greedy(model, ids, 6), greedy(plain, ids, 6))
    assert find_record(model).graphs


def test_rows_that_fill_no_whole_bytes_are_refused() -> None:
    model, _ = of_width(30, 4, bits=1)
    with pytest.raises(sc.SpecacheError, match="34 fills no whole bytes at 1 bit"):
        greedy(model, prompt(90), 2)


def test_rows_that_have_no_halves_stay_exact_with_that_reason() -> None:
    ids, (model, plain) = prompt(90), of_width(31, 4)
    with pytest.warns(sc.SpecacheWarning, match="are not halves of one row"):
        assert torch.equal(greedy(model, ids, 4), greedy(plain, ids, 4))


@pytest.mark.slow
def test_more_bits_of_a_row_are_nearer_and_with_every_pair_fetched_nothing_is_lost() -> None:
    ids = prompt(200)
    with torch.no_grad():
        expected = MODEL.model()(ids).logits[:, -1]

    def distance(bits: float, top_k: int) -> float:
        model, cache = compiled(bits=bits, top_k=top_k, host_bits=16, group_size=32, residual_length=32), DynamicCache()
        with torch.no_grad():
            model(ids[:, :-1], **with_cache(cache), use_cache=True)
            logits = model(ids[:, -1:], **with_cache(cache), use_cache=True).logits[:, -1]
        return float((logits - expected).norm())

    distances = [distance(bits, 8) for bits in (1, 8)]
    assert distances == sorted(distances, reverse=True)
    assert distance(1, 256) < 1e-3 < distances[-1]
