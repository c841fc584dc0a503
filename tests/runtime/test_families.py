"""Each family generates the uncompiled model's tokens under lossless settings, and is rewritten as listed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DynamicCache, LogitsProcessor

from conftest import compile_copy, forget_warnings, left_padding, prompt, step
from families import BY_NAME, FAMILIES, Family
from specache_compile import SpecacheWarning
from specache_compile.compat import with_cache
from specache_compile.runtime.held import HeldTensor
from specache_compile.runtime.records import find_record

WIDENED = [family for family in FAMILIES if family.rewritten and family.lanes == 2]
# What differs behind the graph's words: positions, masks, softcap, sinks, experts, exact layers beside rewritten ones.
DISTINCT = (
    "llama 3", "llama, dynamic rope", "llama, eager attention", "mixtral", "gemma2", "gemma3_text", "phi3, longrope",
    "smollm3", "gpt_neox", "opt", "gpt_oss",
)  # fmt: skip
# What differs in positions and masks, which is what padding touches.
PADDED = ("llama 3", "llama, eager attention", "gemma2", "phi3, longrope", "gpt_neox", "opt", "gpt_oss")
SOME = pytest.mark.parametrize("family", [BY_NAME[name] for name in DISTINCT], ids=DISTINCT)
# Their rotary tables change with the length: these go beyond 144 and 128 tokens, beside a cache that does so too.
CHANGING_ROPE = ("llama, dynamic rope", "phi3, longrope")
OTHERS = [family for family in FAMILIES if family.name not in DISTINCT or family.name in CHANGING_ROPE]


def compiled(family: Family, **options: Any) -> Any:
    return compile_copy(family.model(), **options)


@contextlib.contextmanager
def expected_warnings(family: Family) -> Iterator[None]:
    """Expect the warnings of a family: the reason for exact layers, or that decode has one lane; else none.

    Sliding windows beside rewritten layers do not warn.
    """
    forget_warnings()
    exact = family.exact and not (family.rewritten and family.reason == "sliding window")
    if exact or family.lanes == 1:
        with pytest.warns(SpecacheWarning, match=family.reason if exact else "one token at a time"):
            yield
    else:
        with warnings.catch_warnings(action="error", category=SpecacheWarning):
            yield


def close(got: Tensor, expected: Tensor) -> None:
    """Float32 all along; the tiers' attention sums in another order than SDPA. Logits spread over ±5."""
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)


def assert_same_generation(model: Any, plain: Any, ours: dict[str, Any] | None = None, **inputs: Any) -> None:
    """The same tokens, logits, and hidden states if requested; `ours` is for the compiled model only."""
    requested = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, **inputs}
    expected, got = plain.generate(**requested), model.generate(**requested, **(ours or {}))
    close(torch.stack(got.logits), torch.stack(expected.logits))
    assert torch.equal(got.sequences, expected.sequences)
    for layers, others in zip(got.hidden_states or (), expected.hidden_states or (), strict=True):
        for states, other in zip(layers, others, strict=True):
            close(states, other)


def assert_rewritten_as_listed(model: Any, family: Family, *phases: str) -> None:
    record = find_record(model)
    graphs = record.graphs if record else []
    assert (record.absorbed if record else 0) == family.absorbed
    for graph in graphs:
        assert (len(graph.captured.sites), len(graph.captured.left_alone)) == (family.rewritten, family.exact)
    assert {graph.captured.phase.name for graph in graphs} == (set(phases) if family.rewritten else set())
    made = [each for graph in graphs for each in graph.rewrites.made.values()]
    lanes = {each.lanes for each in made if each.variant.phase.name == "decode"}
    assert lanes == ({family.lanes} if family.rewritten else set())


@pytest.mark.quick_for("mistral, sliding", "gptj", "qwen3_5_text")
@pytest.mark.parametrize("family", OTHERS, ids=[family.name for family in OTHERS])
def test_tokens_equal_the_uncompiled_models(family: Family) -> None:
    """Long enough that tokens leave the recent tier (64) for the low-bit tier; rewritten and widened as listed. One
    layer is enough if all are alike; `DISTINCT` has several."""
    family = family if family.exact or family.name in DISTINCT else family.one_layer
    model = compiled(family)
    with expected_warnings(family):
        ids, new = prompt(60, 2 if family.exact else 1), 90 if family.name in CHANGING_ROPE else 16
        assert_same_generation(model, family.model(), input_ids=ids, max_new_tokens=new)
    assert_rewritten_as_listed(model, family, "prefill", "decode")


def test_hidden_states_come_out_of_the_widened_graph() -> None:
    family = BY_NAME["llama 3"]
    inputs = {"input_ids": prompt(50), "max_new_tokens": 6, "output_hidden_states": True}
    with expected_warnings(family):
        assert_same_generation(compiled(family), family.model(), **inputs)


class SpeculativeTokens(LogitsProcessor):
    """Compares each step's speculative token with the uncompiled model's token after the text and the previous one.

    So lane 1 needs the right positions, masks and lane 0's pair in every layer. `checked` counts the comparisons.
    """

    def __init__(self, plain: Any, cache: DynamicCache, mask: Tensor | None = None) -> None:
        self.plain, self.cache, self.mask = plain, cache, mask
        self.before: Tensor | None = None
        self.checked = 0

    def __call__(self, text: Tensor, scores: Tensor) -> Tensor:
        held = [layer.keys for layer in self.cache.layers if isinstance(layer.keys, HeldTensor)]
        speculative = held[0].handle.session.progress.speculative if held else None
        if self.before is not None and speculative is not None:
            assert torch.equal(speculative, self.predict(torch.cat([text, self.before], 1)).argmax(-1, keepdim=True))
            self.checked += 1
        self.before = speculative
        return scores

    def predict(self, text: Tensor) -> Tensor:
        """The uncompiled model's logits [rows, vocabulary] behind a text."""
        if self.mask is None:
            return self.plain(text, use_cache=False).logits[:, -1]
        mask = torch.cat([self.mask, self.mask.new_ones(len(text), text.shape[1] - self.mask.shape[1])], 1)
        places = (mask.cumsum(1) - 1).clamp(min=0)
        return self.plain(text, use_cache=False, attention_mask=mask, position_ids=places).logits[:, -1]


@pytest.mark.quick_for("llama 3")
@pytest.mark.detects_sizes
@SOME
def test_tokens_equal_over_several_turns(family: Family) -> None:
    """A second turn extends the cache; positions are computed in the graph, not given.

    With sliding layers (window 24) the first turn goes from below the window to above it, in at most five graphs. These
    are a prefill, a decode below the window, and three at its edge and above. Plain Dynamo compiles four there.
    """
    rows, length, steps = (2, 20, 50) if family.exact else (1, 60, 6)
    model, plain = compiled(family), family.model()
    cache = DynamicCache(config=model.config)
    tokens, text, made = SpeculativeTokens(plain, cache), prompt(0, rows), []
    counters.clear()
    with expected_warnings(family):
        for turn, new in ((prompt(length, rows), steps), (prompt(9, rows, seed=2), 6)):
            token = turn
            for _ in range(1 + new):
                text = torch.cat([text, token], 1)
                logits = step(model, token, cache).logits[:, -1]
                close(logits, tokens.predict(text))
                tokens(text, logits)
                token = logits.argmax(-1, keepdim=True)
            made.append(counters["stats"]["unique_graphs"])
    assert tokens.checked == (steps - 1 + 5 if family in WIDENED else 0)
    assert made[0] <= 5 or not family.exact
    assert_rewritten_as_listed(model, family, "prefill", "decode", "extend")


@pytest.mark.quick_for("llama 3")
@pytest.mark.parametrize("family", [BY_NAME[name] for name in PADDED], ids=PADDED)
def test_left_padded_batches(family: Family) -> None:
    """Long enough that a group leaves the recent tier while padded rows decode, at 96 tokens."""
    ids = prompt(90, 3)
    mask = left_padding(ids, 0, 20, 81)
    family = family if family.exact else family.one_layer
    model, plain = compiled(family), family.model()
    cache = DynamicCache(config=model.config)
    tokens = SpeculativeTokens(plain, cache, mask)
    ours = {**with_cache(cache), "logits_processor": [tokens]}
    with expected_warnings(family):
        assert_same_generation(model, plain, ours, input_ids=ids, attention_mask=mask, max_new_tokens=13)
    assert tokens.checked == (11 if family.rewritten and family.lanes == 2 else 0)


def test_returned_attention_weights_leave_the_model_exact() -> None:
    family = BY_NAME["llama, eager attention"].one_layer
    requested = {"do_sample": False, "return_dict_in_generate": True, "output_attentions": True, "max_new_tokens": 4}
    model = compiled(family)
    with pytest.warns(SpecacheWarning, match="output_attentions"):
        got = model.generate(prompt(50), **requested)
    expected = family.model().generate(prompt(50), **requested)
    for layers, others in zip(got.attentions, expected.attentions, strict=True):
        close(torch.cat(layers, 1), torch.cat(others, 1))
    record = find_record(model)
    assert record is None or record.latest is None


@pytest.mark.slow
def test_a_sliding_mask_over_a_whole_cache_is_rewritten() -> None:
    """A DynamicCache made without a config keeps every token: the window is then a mask, and masks are carried over."""
    family = BY_NAME["mistral, sliding"]
    model = compiled(family)
    inputs = {"input_ids": prompt(50), "max_new_tokens": 24, "do_sample": False}
    expected = family.model().generate(**inputs)
    assert torch.equal(model.generate(**inputs, **with_cache(DynamicCache())), expected)
    record = find_record(model)
    assert all(len(graph.captured.sites) == 2 for graph in record.graphs)
