"""Each family gives the uncompiled model's tokens under lossless settings, and is rewritten as the list says."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DynamicCache

from conftest import LOSSLESS, prompt
from families import FAMILIES, Family
from specache_compile import SpecacheWarning
from specache_compile.runtime.records import find_record

EVERY = pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])
WIDENED = [family for family in FAMILIES if family.rewritten and family.lanes == 2]
BY_NAME = {family.name: family for family in FAMILIES}
# What differs behind the graph's words: positions, masks, softcap, sinks, experts, exact layers beside rewritten ones.
DISTINCT = (
    "llama 3", "llama, dynamic rope", "llama, eager attention", "mixtral", "gemma2", "gemma3_text", "phi3, longrope",
    "smollm3", "gpt_neox", "opt", "gpt_oss",
)  # fmt: skip
SOME = pytest.mark.parametrize("family", [BY_NAME[name] for name in DISTINCT], ids=DISTINCT)
# Their rotary tables change with the length: these go beyond 144 and 128 tokens.
CHANGING_ROPE = ("llama, dynamic rope", "phi3, longrope")


def compiled(family: Family, **options: Any) -> Any:
    model = family.model()
    model.compile(backend="specache", options={**LOSSLESS, **options})
    return model


@contextlib.contextmanager
def told(family: Family) -> Iterator[None]:
    """A family with exact layers warns that it has them, and why; another does not warn."""
    if family.exact:
        with pytest.warns(SpecacheWarning, match=family.reason):
            yield
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error", SpecacheWarning)
            yield


def close(got: Tensor, expected: Tensor) -> None:
    """Float32 all along; the tiers' attention sums in another order than SDPA. Logits spread over ±5."""
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)


def assert_same_generation(model: Any, plain: Any, **inputs: Any) -> None:
    asked = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected, got = plain.generate(**inputs, **asked), model.generate(**inputs, **asked)
    close(torch.stack(got.logits), torch.stack(expected.logits))
    assert torch.equal(got.sequences, expected.sequences)


@EVERY
def test_tokens_equal_the_uncompiled_models(family: Family) -> None:
    """Long enough that tokens leave the recent tier (64) for the low-bit tier; rewritten and widened as listed.

    Beside sliding layers (window 24) from below the window to beyond, in at most five graphs: a prefill, a decode below
    the window, and three where plain Dynamo makes four, at its edge and beyond. Then a prompt that is longer.
    """
    model, plain = compiled(family), family.model()
    counters.clear()
    with told(family):
        if family.exact:
            assert_same_generation(model, plain, input_ids=prompt(20, 2), max_new_tokens=50)
            made = counters["stats"]["unique_graphs"]
            assert made <= (5 if family.rewritten else 6), "of a model with nothing to rewrite all are Dynamo's own"
        new = 90 if family.name in CHANGING_ROPE else 16
        assert_same_generation(model, plain, input_ids=prompt(60, 2 if family.exact else 1), max_new_tokens=new)
    record = find_record(model)
    graphs = record.graphs if record else []
    for graph in graphs:
        assert (len(graph.captured.sites), len(graph.captured.left_alone)) == (family.rewritten, family.exact)
    assert {graph.phase for graph in graphs} == ({"prefill", "decode"} if family.rewritten else set())
    lanes = {
        report.counts["lanes"]
        for graph in graphs
        for trace in graph.rewrites.traces
        for report in trace.reports
        if trace.phase == "decode" and report.name == "speculate"
    }
    assert lanes == ({family.lanes} if family.rewritten else set())


@pytest.mark.parametrize("name", ["llama 3", "llama, eager attention", "gemma2", "gpt_oss"])
def test_one_lane_gives_the_same_tokens(name: str) -> None:
    """Not widened: only what an attention computes tells families apart."""
    family = BY_NAME[name]
    with told(family):
        model = compiled(family, speculate=False)
        assert_same_generation(model, family.model(), input_ids=prompt(90), max_new_tokens=12)


class Conversation:
    """A model called step by step beside the uncompiled one, which sees the whole text anew each time.

    `checked` counts the guesses that were compared: lane 1 must predict what the uncompiled model does behind the
    output token and the guess before. That needs the right positions, masks and lane 0's pair in every layer.
    """

    def __init__(self, family: Family, mask: Tensor | None = None) -> None:
        self.plain, self.model = family.model(), compiled(family)
        self.rows = 1 if mask is None else mask.shape[0]
        self.mask, self.text = mask, torch.empty(self.rows, 0, dtype=torch.int64)
        self.cache: Any = None
        self.checked = 0

    def hears(self, ids: Tensor) -> Tensor:
        """Feed tokens to both; the next greedy token."""
        self.text = torch.cat([self.text, ids], 1)
        out = self.model(ids, past_key_values=self.cache, use_cache=True, **self.padding(self.text, ids.shape[1]))
        self.cache = out.past_key_values
        close(out.logits[:, -1], self.predict(self.text))
        return out.logits[:, -1].argmax(-1, keepdim=True)

    def predict(self, text: Tensor) -> Tensor:
        return self.plain(text, use_cache=False, **self.padding(text, text.shape[1])).logits[:, -1]

    def padding(self, text: Tensor, new: int) -> dict[str, Tensor]:
        """The mask and the positions, as `generate` would give them; nothing where there is no padding."""
        if self.mask is None:
            return {}
        mask = torch.cat([self.mask, self.mask.new_ones(self.rows, text.shape[1] - self.mask.shape[1])], 1)
        return {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, -new:]}

    def goes_on(self, token: Tensor, steps: int) -> Tensor:
        """Greedy steps; from the second on, the guess is compared."""
        before = None
        for _ in range(steps):
            token = self.hears(token)
            guess = self.guess()
            if before is not None and guess is not None:
                assert torch.equal(guess, self.predict(torch.cat([self.text, before], 1)).argmax(-1, keepdim=True))
                self.checked += 1
            before = guess
        return token

    def guess(self) -> Tensor | None:
        held = [layer.keys for layer in self.cache.layers if hasattr(layer.keys, "handle")]
        return held[0].handle.session.guess if held else None


@SOME
def test_left_padded_batches(family: Family) -> None:
    """Long enough that a group leaves the recent tier while padded rows decode, at 96 tokens."""
    mask = torch.ones(3, 90, dtype=torch.int64)
    mask[1, :20], mask[2, :81] = 0, 0
    with torch.no_grad(), told(family):
        conversation = Conversation(family, mask)
        conversation.goes_on(conversation.hears(prompt(90, 3)), 12)
    assert conversation.checked == (11 if family in WIDENED else 0)


@SOME
def test_several_turns(family: Family) -> None:
    """A second turn extends the cache; positions are computed in the graph, not given."""
    with torch.no_grad(), told(family):
        conversation = Conversation(family)
        conversation.goes_on(conversation.hears(prompt(60)), 6)
        conversation.goes_on(conversation.hears(prompt(9, seed=2)), 6)
    assert conversation.checked == (10 if family in WIDENED else 0)


@pytest.mark.parametrize("name", ["llama 3", "gemma2"])
def test_hidden_states_come_out_of_the_widened_graph(name: str) -> None:
    family = BY_NAME[name]
    asked = {"do_sample": False, "return_dict_in_generate": True, "output_hidden_states": True, "max_new_tokens": 6}
    with told(family):
        got = compiled(family).generate(prompt(50), **asked)
    expected = family.model().generate(prompt(50), **asked)
    for layers, others in zip(got.hidden_states, expected.hidden_states, strict=True):
        for states, other in zip(layers, others, strict=True):
            close(states, other)


def test_returned_attention_weights_leave_the_model_exact() -> None:
    family = BY_NAME["llama, eager attention"]
    asked = {"do_sample": False, "return_dict_in_generate": True, "output_attentions": True, "max_new_tokens": 4}
    model = compiled(family)
    with pytest.warns(SpecacheWarning, match="output_attentions"):
        got = model.generate(prompt(50), **asked)
    expected = family.model().generate(prompt(50), **asked)
    for layers, others in zip(got.attentions, expected.attentions, strict=True):
        close(torch.cat(layers, 1), torch.cat(others, 1))
    assert find_record(model) is None


def test_a_sliding_mask_over_a_whole_cache_is_rewritten() -> None:
    """A DynamicCache made without a config keeps every token: the window is then a mask, and masks are carried over."""
    family = BY_NAME["mistral, sliding"]
    model = compiled(family)
    inputs = {"input_ids": prompt(50), "max_new_tokens": 24, "do_sample": False}
    expected = family.model().generate(**inputs)
    assert torch.equal(model.generate(**inputs, past_key_values=DynamicCache()), expected)
    record = find_record(model)
    assert record is not None
    assert all(len(graph.captured.sites) == 2 for graph in record.graphs)
