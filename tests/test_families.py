"""Each family gives the uncompiled model's tokens under lossless settings, and is rewritten as the list says."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from conftest import LOSSLESS, greedy, prompt
from families import FAMILIES, Family
from specache_compile import SpecacheWarning
from specache_compile.records import find_record

EVERY = pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])


def compiled(family: Family, **options: Any) -> Any:
    model = family.model()
    model.compile(backend="specache", options={**LOSSLESS, **options})
    return model


def run(family: Family, model: Any, inputs: Any, tokens: int) -> torch.Tensor:
    """Greedy tokens; a family with exact layers warns that it has them, another does not warn."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SpecacheWarning)
        out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    told = [w for w in caught if issubclass(w.category, SpecacheWarning)]
    assert bool(told) == bool(family.exact)
    assert all(family.reason in str(w.message) for w in told)
    return out


@EVERY
def test_tokens_equal_the_uncompiled_models(family: Family) -> None:
    """Long enough that tokens leave the recent tier (64) for the low-bit tier; rewritten and widened as listed."""
    model = compiled(family)
    tokens = run(family, model, {"input_ids": prompt(50)}, 110)
    assert torch.equal(tokens, greedy(family.model(), prompt(50), 110))
    record = find_record(model)
    graphs = record.graphs if record else []
    for graph in graphs:
        assert (len(graph.sites), len(graph.left_alone)) == (family.rewritten, family.exact)
    assert {g.phase for g in graphs} == ({"prefill", "decode"} if family.rewritten else set())
    lanes = [c.lanes for g in graphs for (phase, *_), (_, c) in g.lowered.items() if phase == "decode"]
    assert set(lanes) == ({family.lanes} if family.rewritten else set())


@EVERY
def test_left_padded_batches(family: Family) -> None:
    mask = torch.ones(3, 70, dtype=torch.int64)
    mask[1, :20], mask[2, :61] = 0, 0
    inputs = {"input_ids": prompt(70, 3) * mask, "attention_mask": mask}
    expected = family.model().generate(**inputs, max_new_tokens=40, do_sample=False)
    assert torch.equal(run(family, compiled(family), inputs, 40), expected)


@EVERY
def test_several_turns_and_one_lane(family: Family) -> None:
    """A second turn extends the cache; positions are computed in the graph, not given."""

    def two_turns(model: Any) -> torch.Tensor:
        with torch.no_grad():
            cache = model(prompt(70), use_cache=True).past_key_values
            out = model(prompt(9), past_key_values=cache)
            logits = [out.logits[:, -1]]
            for _ in range(40):
                out = model(logits[-1].argmax(-1, keepdim=True), past_key_values=out.past_key_values)
                logits.append(out.logits[:, -1])
        return torch.stack(logits)

    expected = two_turns(family.model())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecacheWarning)
        two_lanes = two_turns(compiled(family))
        torch._dynamo.reset()
        one_lane = two_turns(compiled(family, speculate=False))
    torch.testing.assert_close(two_lanes, expected, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(one_lane, expected, atol=2e-3, rtol=1e-3)
