"""In every family a short row beside a long one, in chunks, generates what it generates alone, uncompiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import specache_compile as sc
from conftest import compiled_with, prompt
from families import DYNAMIC_ROPE, FAMILIES, LONG_ROPE, Family
from specache_compile.compat import cache_of

OPTIONS = {"bits": 16, "lowering": "eager"}
# RoPE that follows the length, masks of its own, positions by columns, an indexer, and one plain family.
QUICK = ("llama 2", "llama, dynamic rope", "phi3, longrope", "falcon, alibi", "llama4_text", "deepseek_v32")
SHORT, LONG, NEW = 20, 60, 4
LONGROPE = {"rope_parameters": {**LONG_ROPE, "original_max_position_embeddings": 48}}
LLAMA = Family("llama", "LlamaConfig", LONGROPE)
PHI3 = Family("phi3", "Phi3Config", {**LONGROPE, "original_max_position_embeddings": 48})
DYNAMIC = Family("dynamic", "LlamaConfig", {"rope_parameters": DYNAMIC_ROPE, "max_position_embeddings": 48})


def alone(model: Any, ids: torch.Tensor, new: int) -> list[int]:
    """By an uncompiled copy: dynamic RoPE changes a model's buffers."""
    mask = torch.ones_like(ids)  # token 0 is no padding
    out = copy.deepcopy(model).generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.quick_for(*QUICK)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.filterwarnings("ignore::specache_compile.SpecacheWarning")
def test_a_short_row_beside_a_long_one_generates_what_it_does_alone(family: Family) -> None:
    plain = family.model()
    model = compiled_with(plain, OPTIONS)
    batch = sc.Batch(model, chunk=24)
    prompts = [prompt(length, seed=length) for length in (SHORT, LONG)]
    requests = [batch.add(ids, max_new_tokens=NEW) for ids in prompts]
    batch.run()
    assert [request.error for request in requests] == [None, None]
    for ids, request in zip(prompts, requests, strict=True):
        assert request.generated == alone(plain, ids, NEW)


@pytest.mark.parametrize("family", [PHI3, LLAMA], ids=lambda family: family.name)
def test_rows_on_both_sides_of_a_rope_switch_generate_what_each_does_alone(family: Family) -> None:
    """Those beyond it run when the others are finished, and prompts there continue no cache."""
    plain = family.model()
    batch = sc.Batch(compiled_with(plain, OPTIONS), chunk=24, sessions=4)
    prompts = [prompt(length, seed=length) for length in (20, 60, 39, 49)]
    requests = [batch.add(ids, max_new_tokens=9) for ids in prompts]
    while batch.open:
        batch.step()
        assert len({len(request.prompt) > 48 for request in batch.decoding}) <= 1
    further = torch.cat([requests[0].ids, prompt(5, seed=5)], 1)
    beyond = torch.cat([requests[1].ids, prompt(5, seed=5)], 1)
    turns = [batch.add(ids, max_new_tokens=9) for ids in (further, beyond)]
    batch.run()
    assert [turn.reused for turn in turns] == [28, 0]
    for ids, request in zip([*prompts, further, beyond], [*requests, *turns], strict=True):
        assert request.generated == alone(plain, ids, 9)


@pytest.mark.parametrize(
    ("family", "tokens"), [(PHI3, (40, 10)), (LLAMA, (48, 2)), (DYNAMIC, (20, 40)), (DYNAMIC, (49, 1))]
)
def test_requests_whose_rope_changes_are_refused(family: Family, tokens: tuple[int, int]) -> None:
    """A request whose last call has 48 tokens runs."""
    plain = family.model()
    batch = sc.Batch(compiled_with(plain, OPTIONS))
    message = r"{} prompt and {} new tokens: beyond 48 tokens .* Lower max_new_tokens, or call model\.generate"
    with pytest.raises(sc.SpecacheError, match=message.format(*tokens)):
        batch.add(prompt(tokens[0]), max_new_tokens=tokens[1])
    assert not batch.open
    longest = batch.add(prompt(40), max_new_tokens=9)
    batch.run()
    assert longest.generated == alone(plain, prompt(40), 9)


def test_join_refuses_rows_on_both_sides_of_a_rope_switch() -> None:
    model = compiled_with(PHI3.model(), OPTIONS)
    with torch.no_grad():
        short, near, long = (cache_of(model(prompt(length), use_cache=True)) for length in (20, 47, 60))
        for caches in ([short, long], [sc.hold(sc.materialize(each), model) for each in (short, long)]):
            with pytest.raises(sc.SpecacheError, match="some rows are longer than 48 tokens"):
                sc.join(caches)
        joined = sc.join([short, near])
        ids = torch.tensor([[5], [6]])
        cache = model(ids, past_key_values=joined, position_ids=sc.lengths(joined)[:, None]).past_key_values
        with pytest.raises(sc.SpecacheError, match="cannot run in one call"):
            model(ids, past_key_values=cache, position_ids=sc.lengths(cache)[:, None])
