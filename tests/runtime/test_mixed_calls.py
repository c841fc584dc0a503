"""A process that serves mixed calls: any batch size, any order, any options, a handful of graphs."""

from __future__ import annotations

import itertools
import random
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

import specache_compile as sc
from conftest import LOSSLESS, compile_copy, eager, greedy, left_padding, prompt, step, tiny_llama
from specache_compile.compat import GENERATE_MASKS_ALL, cache_of
from specache_compile.passes.reading.nodes import value_of
from specache_compile.runtime.records import find_record


def graphs(model: Any) -> Counter[tuple[str, bool]]:
    """Rewritten graphs by phase, and by whether they are for padded batches; prompts of one token apart."""
    record = find_record(model)
    read = [graph.captured for graph in record.graphs]
    one_token = [not graph.phase.has_past and value_of(graph.sites[0].q).shape[2] == 1 for graph in read]
    return Counter(
        ("prompt of one token" if one else graph.phase.name, graph.padding is not None)
        for graph, one in zip(read, one_token, strict=True)
    )


# Batch sizes


@pytest.mark.quick_for
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_any_batch_size_runs_in_two_graphs_a_phase(llama: LlamaForCausalLM, lowering: str) -> None:
    """One graph for a batch of one, which Dynamo always treats as a constant, and one for all others. Beams and
    returned sequences are batch sizes too, and padded batches have separate graphs."""
    twin = compile_copy(llama, lowering=lowering)
    for batch in (1, 2, 3, 4, 6, 8, 5, 7) if lowering == "eager" else (3, 1, 2):
        ids = prompt(60 + batch, batch)
        assert torch.equal(greedy(twin, ids, 8), greedy(llama, ids, 8))
    masked = GENERATE_MASKS_ALL  # by ones, as a padded batch is
    assert graphs(twin) == {("prefill", masked): 2, ("decode", masked): 2}
    assert sc.stats(twin).compiles == 6, "each of them once; a decode's pre-decode besides"
    if lowering == "inductor":
        return
    for beams, rows, returned in ((2, 1, 1), (3, 2, 2), (4, 1, 3), (5, 1, 1), (3, 3, 1)):
        how = {"num_beams": beams, "num_return_sequences": returned}
        ids = prompt(20, rows)
        assert torch.equal(greedy(twin, ids, 12, **how), greedy(llama, ids, 12, **how))
    assert max(graphs(twin).values()) <= 2
    for batch, length in ((2, 30), (5, 90), (3, 64), (7, 31)):
        ids, chance = prompt(length, batch), random.Random(batch)
        mask = left_padding(ids, length // 2, *(chance.randrange(length) for _ in range(batch - 2)), 0)
        expected = greedy(llama, ids, 12, attention_mask=mask)
        assert torch.equal(greedy(twin, ids, 12, attention_mask=mask), expected)
    made = 2 if masked else 1
    assert {key: n for key, n in graphs(twin).items() if key[1]} == {("prefill", True): made, ("decode", True): made}


def test_the_callers_tensors_are_as_they_were() -> None:
    """Dynamo guards on the marks of dynamic sizes: marks left on a tensor would cost other models a graph."""
    compiled = compile_copy(tiny_llama(num_hidden_layers=1))
    ids = prompt(20, 3)
    mask = left_padding(ids, 4, 0, 0)
    before = [dict(vars(tensor)) for tensor in (ids, mask)]
    step(compiled, ids, attention_mask=mask)
    assert [vars(tensor) for tensor in (ids, mask)] == before


# Options

# One of each kind of state: low-bit tiers with and without slots, the whole cache on either side, keys apart, evicted.
MADE_UNDER = {
    "specache": LOSSLESS,
    "kivi": {"bits": 16},
    "full": {},
    "offload": {},
    "kcache": {"top_n": 1024},
    "h2o": {"budget": 1024},
}


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=64)  # Dynamo counts the copies' graphs together
def test_a_cache_goes_on_as_it_was_made_whichever_copy_it_comes_to() -> None:
    """Every pair of methods: the cache that the one has made decodes and extends under the other, and the one again."""
    model = tiny_llama()
    copies = {method: eager(model, method=method, **options) for method, options in MADE_UNDER.items()}
    ids, plain = prompt(100), DynamicCache()
    spans = ((0, 90), (90, 91), (91, 92), (92, 93), (93, 99), (99, 100))
    expected = [step(model, ids[:, a:b], plain).logits for a, b in spans]
    for first, second in itertools.permutations(MADE_UNDER, 2):
        cache, reported = DynamicCache(), []
        for method, (start, stop), right in zip(
            (first, first, second, first, second, first), spans, expected, strict=True
        ):
            with warnings.catch_warnings(record=True, action="always") as caught:
                got = step(copies[method], ids[:, start:stop], cache).logits
            reported += [method for warning in caught if "other options" in str(warning.message)]
            torch.testing.assert_close(got, right, atol=1e-3, rtol=1e-3, msg=f"{first}, then {second}, at {start}")
        assert reported == [second], "once"


def test_a_setting_that_differs_makes_a_graph_of_its_own() -> None:
    """One method, two numbers of bits: the cache keeps its own, and the warning names both."""
    model = tiny_llama(num_hidden_layers=1)
    narrow, wide = (eager(model, method="kivi", bits=bits) for bits in (2, 16))
    ids = prompt(200)

    def logits(later: LlamaForCausalLM) -> Tensor:
        cache = cache_of(step(narrow, ids[:, :150]))
        return torch.cat([step(later, ids[:, t : t + 1], cache).logits for t in range(150, 160)], 1)

    expected = logits(narrow)
    with pytest.warns(sc.SpecacheWarning, match=r"bits 2 \(the model's: 16\)"):
        got = logits(wide)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
