"""`explain`: what it predicts is what runs."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import specache_compile as sc
from conftest import compile_copy, greedy, prompt
from specache_compile.passes.pipeline import PASS_NAMES
from specache_compile.records import find_record
from specache_compile.tiers import bucket, paper_kv_ratio


def test_it_lists_sites_passes_and_bytes(llama: LlamaForCausalLM) -> None:
    explained = sc.explain(llama, prompt_length=2000, batch_size=3, options={"bits": 1})
    assert [(s.layer, s.query_heads, s.heads, s.head_dim) for s in explained.sites] == [(0, 4, 2, 16), (1, 4, 2, 16)]
    assert explained.left_alone == ()
    assert explained.lanes == 2
    assert set(explained.traces) == {"prefill", "pre-decode", "decode"}
    assert [r.name for r in explained.traces["decode"].reports] == list(PASS_NAMES)
    assert 0 < explained.kv_ratio < 1
    text = str(explained)
    assert "low-bit" in text
    assert "rewrite_attention" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_graph_it_shows_is_the_graph_that_runs(llama: LlamaForCausalLM) -> None:
    options = {"bits": 2, "group_size": 32, "residual_length": 32, "top_k": 16}
    explained = sc.explain(llama, prompt_length=100, options=options)
    twin = compile_copy(llama, **options)
    greedy(twin, prompt(100), 5)
    running = {phase: module for g in find_record(twin).graphs for phase, module in g.modules.items()}
    for phase in ("pre-decode", "decode"):
        shown, ran = explained.graph(phase), running[phase]
        ops = [[str(n.target) for n in g.graph.nodes if n.op == "call_function"] for g in (shown, ran)]
        assert ops[0] == ops[1]


def test_graphs_before_and_after_each_pass(llama: LlamaForCausalLM) -> None:
    explained = sc.explain(llama, prompt_length=64)
    assert "scaled_dot_product_attention" in explained.graph("decode", after="captured")
    assert "specache.decode_attention" in explained.graph("decode", after="rewrite_attention")
    with pytest.raises(sc.SpecacheError, match="there are captured, find_attention"):
        explained.graph("decode", after="sort")
    with pytest.raises(sc.SpecacheError, match="there are prefill, pre-decode, decode"):
        explained.graph("encode")


def test_a_large_model_explains_from_its_config_without_weights() -> None:
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=131072, dtype=torch.bfloat16,
    )  # fmt: skip
    start = time.time()
    explained = sc.explain(config, prompt_length=32_768, batch_size=4, options={"bits": 1})
    assert time.time() - start < 60
    assert explained.full_cache_bytes == 4 * 32_768 * 2 * 8 * 128 * 2 * 2
    # Scales of 16 bits, k and R of 64: the paper's 0.10, and up to an eighth of spare room in a bucket.
    assert explained.kv_ratio == pytest.approx(paper_kv_ratio(1, 64, 32_768), rel=0.15)


def test_bad_sizes_are_named(llama: LlamaForCausalLM) -> None:
    with pytest.raises(sc.SpecacheError, match="prompt_length=0"):
        sc.explain(llama, prompt_length=0)


@pytest.mark.parametrize(
    ("length", "bits", "group", "printed"),
    [
        (32_768, 2, 32, 0.19), (32_768, 2, 64, 0.16), (32_768, 1, 32, 0.13), (32_768, 1, 64, 0.10),
        (8_192, 2, 32, 0.20), (8_192, 2, 64, 0.17), (8_192, 1, 32, 0.14), (8_192, 1, 64, 0.11),
        (4_096, 2, 32, 0.22), (4_096, 2, 64, 0.19),
    ],
)  # fmt: skip
def test_the_formula_reproduces_table_1_of_the_paper(length: int, bits: int, group: int, printed: float) -> None:
    assert abs(paper_kv_ratio(bits, group, length) - printed) <= 0.0051


@pytest.mark.parametrize("length", [1, 255, 256, 257, 2048, 2049, 5000, 40_000, 131_072])
def test_a_bucket_holds_the_tokens_and_wastes_little(length: int) -> None:
    size = bucket(length)
    assert size >= length
    assert size - length < max(256, length / 8 + 1)
    assert size % 128 == 0
