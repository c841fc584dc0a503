"""`explain`: what it predicts is what runs."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM

import specache_compile as sc
from conftest import compile_copy, greedy, prompt, tiny_llama
from families import BY_NAME, DYNAMIC
from specache_compile.explaining.explanation import Explanation
from specache_compile.explaining.graph_text import readable_graph
from specache_compile.passes.pipeline import PIPELINE
from specache_compile.passes.reading.nodes import value_of
from specache_compile.runtime.records import find_record
from specache_compile.runtime.state import bucket, room


@functools.cache
def of_64_tokens() -> Explanation:
    return sc.explain(tiny_llama(), prompt_length=64, options={"speculate": True})


def calls_of(graph_module: GraphModule) -> str:
    """The ops of a graph in their order, with the shapes of their results, their constants and numbered symbols."""
    calls, symbols = [], dict[str, str]()
    for node in (node for node in graph_module.graph.nodes if node.op == "call_function"):
        shapes = [getattr(value, "shape", value) for value in tree_leaves(value_of(node))]
        constants = [x for x in tree_leaves((node.args, node.kwargs)) if not isinstance(x, Node)]
        calls.append(f"{node.target} {shapes} {constants}")
    return re.sub(r"\bs\d+\b", lambda name: symbols.setdefault(name[0], f"s{len(symbols)}"), "\n".join(calls))


def test_it_lists_sites_passes_and_bytes(llama: LlamaForCausalLM) -> None:
    explained = sc.explain(llama, prompt_length=2000, batch_size=3, options={"bits": 1, "speculate": True})
    assert [(s.layer, s.query_heads, s.heads, s.head_dim) for s in explained.sites] == [(0, 4, 2, 16), (1, 4, 2, 16)]
    assert explained.left_alone == ()
    assert explained.lanes == 2
    assert set(explained.stages) == {"prefill", "pre-decode", "decode"}
    assert list(explained.stages["decode"]) == ["captured", *(each.__name__ for each in PIPELINE)]
    assert 0 < explained.kv_ratio < 1
    text = str(explained)
    assert "device: low-bit" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_graph_it_shows_is_the_graph_that_runs(llama: LlamaForCausalLM) -> None:
    options = {"setting": "best", "bits": 2, "group_size": 32, "residual_length": 32, "top_k": 16, "speculate": True}
    explained = sc.explain(llama, prompt_length=100, options=options)
    twin = compile_copy(llama, **options)
    # What is explained is one length; what runs has a symbol for it, unless Dynamo is told to make none.
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        greedy(twin, prompt(100), 5)
    running = {phase: module for g in find_record(twin).graphs for phase, module in g.rewrites.modules.items()}
    for phase in ("prefill", "pre-decode", "decode"):
        assert calls_of(explained.graph(phase)) == calls_of(running[phase])


def test_graphs_before_and_after_each_pass() -> None:
    explained = of_64_tokens()
    assert "scaled_dot_product_attention" in explained.graph("decode", after="captured")
    assert "specache.decode_attention" in explained.graph("decode", after="rewrite_attention")
    with pytest.raises(sc.SpecacheError, match="there are captured, own_cache"):
        explained.graph("decode", after="sort")
    with pytest.raises(sc.SpecacheError, match="there are prefill, pre-decode, decode"):
        explained.graph("encode")


def test_it_tells_what_a_pass_changed() -> None:
    explained = of_64_tokens()
    diff = [line for line in explained.diff("decode", "rewrite_attention").splitlines() if "# File" not in line]
    removed, added = ([line for line in diff if line.startswith(sign)] for sign in "-+")
    assert sum("nn.scaled_dot_product_attention(" in line for line in removed) == 2
    assert sum("specache.decode_attention" in line for line in added) == 2
    assert explained.diff("prefill", "speculate") == ""
    with pytest.raises(sc.SpecacheError, match="there are own_cache"):
        explained.diff("decode", "captured")


def test_the_text_fits_on_one_screen_and_compares_with_16_bits(llama: LlamaForCausalLM) -> None:
    """In float32 too: the baseline is a cache of two bytes an element."""
    explained = sc.explain(llama, prompt_length=1000, options={"exact_layers": [0]})
    text = str(explained)
    assert 20 <= len(text.splitlines()) <= 40
    assert "1 of 2 attentions rewritten" in text
    assert "left exact, 1 (0): " in text
    assert [site.model_layer for site in explained.sites] == ["1"]
    assert [item.node.split(":")[0] for item in explained.left_alone] == ["layer 0"]
    assert "exact_layers" in explained.left_alone[0].reason
    assert "All figures are computed, not measured" in text
    assert llama.dtype == torch.float32
    assert explained.full_cache_bytes == 2 * 1000 * 2 * 16 * 2
    assert len(re.findall("decode step on", text)) == 1, "one estimate of time"
    assert text.count("e.layer(1)") == 1


# The op's results in the order in which it returns them.
RESULTS = {"best": r"logits, base, scores = specache.score_low_bit\(q_embed,",
           "paper": r"attention, scores = specache.decode_attention\("}  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "ops"),
    [("best", ("score_low_bit", "correct", "attend_scored", "append")),
     ("paper", ("wait", "decode_attention", "select_topk", "prefetch", "append"))],
)  # fmt: skip
def test_one_layer_is_python_of_at_most_60_lines(setting: str, ops: tuple[str, ...]) -> None:
    explained = sc.explain(tiny_llama(), prompt_length=64, options={"setting": setting})
    text = explained.layer(1)
    assert len(text.splitlines()) <= 60
    assert max(map(len, text.splitlines())) <= 130
    texts = {stage: str(explained.graph("decode", stage, layer=1)) for stage in explained.stages_of("decode")}
    before, *_, after = texts.values()
    for code in (before, after):
        assert [type(part) for part in ast.parse(code).body] == [ast.FunctionDef]
        assert not re.search("l_(self|args)", code.lower())
        assert "self_attn.q_proj.weight" in code
    assert before.count("scaled_dot_product_attention(") == 1
    assert "specache." not in before
    places = [after.index(f"specache.{op}(") for op in ops]
    assert places == sorted(places)
    assert re.search(RESULTS[setting], after)
    diff = explained.diff("decode", layer=1)
    assert "-    attn_output = scaled_dot_product_attention(" in diff
    assert f"specache.{ops[-1]}(" in diff
    with pytest.raises(sc.SpecacheError, match="layer=7: the graph has layers 0-1"):
        explained.graph("decode", layer=7)


def test_the_values_of_a_layers_text_are_defined_before_they_are_used() -> None:
    """Each name is an input, a weight, a function, or assigned above."""
    for stage in ("captured", None):
        code = str(of_64_tokens().graph("decode", stage, layer=1))
        (function,) = ast.parse(code).body
        assert isinstance(function, ast.FunctionDef)
        known = {argument.arg for argument in function.args.args} | {"torch", "specache", "linear", "silu"}
        known |= {"scaled_dot_product_attention", "self_attn", "mlp"}
        for statement in function.body:
            names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
            loaded = {node.id for node in names if isinstance(node.ctx, ast.Load)}
            assert {name for name in loaded - known if "layernorm" not in name} == set()
            known |= {node.id for node in names if isinstance(node.ctx, ast.Store)}


def test_the_whole_graph_is_printed_without_the_list_of_its_inputs() -> None:
    code = readable_graph(of_64_tokens().graph("decode"))
    assert max(map(len, code.splitlines())) < 1500
    assert re.search(r"def forward\(self, \.\.\.\):  # \d+ inputs", code)
    assert code.count("specache.decode_attention") + code.count("specache.attend_scored") == 2


def test_a_model_of_which_nothing_is_rewritten_says_why() -> None:
    explained = sc.explain(BY_NAME["mistral, sliding"].model(), prompt_length=64)
    assert (explained.sites, len(explained.left_alone)) == ((), 2)
    assert "sliding window" in str(explained)


def test_a_model_that_decides_by_values_is_refused_in_words() -> None:
    with pytest.raises(sc.SpecacheError, match="decides by the values of a tensor"):
        sc.explain(tiny_llama(**DYNAMIC), prompt_length=64)


@pytest.mark.slow
def test_a_path_and_a_meta_model_explain_as_the_config_does(tmp_path: Path) -> None:
    config = tiny_llama().config
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        meta = LlamaForCausalLM(config)
    first, *others = (sc.explain(given, prompt_length=300) for given in (config, tmp_path, tmp_path / "config.json"))
    decode = calls_of(first.graph("decode"))
    for other in others:
        assert (other.bytes_by_tier, calls_of(other.graph("decode"))) == (first.bytes_by_tier, decode)
    assert sc.explain(meta, prompt_length=300).bytes_by_tier == first.bytes_by_tier


def test_a_bad_share_and_a_layer_that_is_missing_are_named(llama: LlamaForCausalLM) -> None:
    with pytest.raises(sc.OptionError, match=r"exact_layers=\[.*\]: the model has 2 layers, from 0"):
        sc.explain(llama, prompt_length=64, options={"exact_layers": [2, 0]})
    with pytest.raises(sc.SpecacheError, match="reuse=2"):
        sc.explain(llama, reuse=2)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 2048, 2049, 5000, 40_000, 131_072])
def test_a_bucket_holds_the_tokens_and_wastes_little(length: int) -> None:
    size = bucket(length)
    assert size >= length
    assert size - length < max(256, length / 8 + 1)
    assert size % 128 == 0
    assert size >= room(length) >= length, "the host tier's memory"
    assert room(length) - length < max(256, length / 64 + 1)
    assert room(length) % 256 == 0
