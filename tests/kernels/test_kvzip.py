"""KVzip's scores against the model's attention, its selection against kvpress, and the compiled model with it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import byte_tokenizer, eager, step, tiny_llama
from specache_compile.compat import cache_of
from specache_compile.errors import SpecacheError
from specache_compile.evaluation.baselines import kvzip
from specache_compile.evaluation.reader import Reader
from specache_compile.evaluation.runner import Prefills, Runner
from specache_compile.evaluation.settings import Setting, running
from specache_compile.runtime.session import session_of

KVPRESS = load_file(Path(__file__).with_name("kvzip.safetensors"))
CHUNK, BEHIND = 32, [62]


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def options(**given: Any) -> kvzip.KVzipOptions:
    return kvzip.KVzipOptions(chunk=CHUNK, **given)


def own_attention(model: LlamaForCausalLM, ids: Tensor, places: slice, following: Tensor, first: int) -> Tensor:
    """Return the eager attention from the repetition to `places` [layers, H, c], with the softmax restricted to the
    first pairs, these pairs, and the repetition."""
    n, heads = ids.shape[1], model.config.num_key_value_heads
    columns = [*range(first), *range(places.start, places.stop), *range(n, n + following.shape[1])]
    layers = step(model, torch.cat([ids, following], 1), output_attentions=True).attentions
    part = torch.stack([layer[0, :, n:][..., columns].double() for layer in layers])
    share = (part / part.sum(-1, keepdim=True))[..., first : first + places.stop - places.start]
    return share.unflatten(1, (heads, -1)).amax((2, 3))


def test_scores_are_the_models_own_attention_to_each_chunk() -> None:
    model = tiny_llama()
    ids, start, first = torch.randint(0, 128, (1, 75)), 3, 4
    repeated = kvzip.repetitions(ids, start, CHUNK, encode, BEHIND)
    found = kvzip.scores(model, cache_of(step(model, ids)), repeated, 75, first)[:, 0]
    model.set_attn_implementation("eager")
    expected = torch.zeros(found.shape, dtype=torch.float64)
    for chunk, (begin, stop) in enumerate(((3, 35), (35, 67), (67, 75))):
        lead = encode(kvzip.REPEAT_PART if chunk else kvzip.REPEAT) + ids[0, begin - 8 : begin].tolist() * (chunk > 0)
        following = torch.tensor([lead + BEHIND + ids[0, begin:stop].tolist()])
        expected[..., begin:stop] = own_attention(model, ids, slice(begin, stop), following, min(first, begin))
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-4)


def test_it_keeps_what_kvpress_keeps() -> None:
    """For a context of two chunks after the chat template's first token."""
    shape = {name: int(KVPRESS[name]) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    model = LlamaForCausalLM(
        LlamaConfig(**shape, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    ).eval()
    model.load_state_dict({name[6:]: x for name, x in KVPRESS.items() if name.startswith("model:")}, strict=True)
    ids, expected = KVPRESS["ids"], KVPRESS["stays"].bool()
    chosen = kvzip.chosen(
        model, cache_of(step(model, ids)), ids, options(budget=int(expected.sum()) // 4), 1, encode, encode(">")
    )
    found = torch.zeros(*expected.shape[:3], ids.shape[1] + 1, dtype=torch.bool)
    found.scatter_(3, chosen.long() % (ids.shape[1] + 1), True)
    assert torch.equal(found[..., :-1], expected)
    assert expected.sum(-1).unique().numel() > 2, "heads keep different numbers of pairs"


def test_first_tokens_stay_and_heads_share_the_rest() -> None:
    score = torch.rand(2, 3, 2, 40, generator=torch.Generator().manual_seed(0))
    score[:, :, 0] += 1
    chosen = kvzip.kept(score, 10, 4)
    for row in range(3):
        stays = [[set(chosen[layer, row, head].tolist()) - {-1} for head in (0, 1)] for layer in (0, 1)]
        flat = list(itertools.chain(*stays))
        assert sum(map(len, flat)) == 2 * 2 * 10
        assert all(stay >= {0, 1, 2, 3} for stay in flat)
        assert [len(stay) for stay in flat[1::2]] == [4, 4], "the other head's scores are larger"


def test_the_compiled_model_attends_to_kept_and_later_pairs() -> None:
    """The uncompiled model hides the other pairs by a mask; with one layer the mask can differ by head."""
    model = tiny_llama(num_hidden_layers=1, num_key_value_heads=4)
    ids, more = torch.randint(0, 128, (2, 60)), torch.randint(0, 128, (2, 5))
    whole = cache_of(step(model, ids))
    chosen = kvzip.chosen(model, whole, ids, options(budget=0.25), 0, encode, BEHIND)
    hidden = torch.ones(2, 4, 60 + 1, dtype=torch.bool).scatter_(2, chosen[0].long() % 61, False)[..., :60]
    twin = eager(model, method="kvzip", budget=0.25)
    cache = kvzip.held(whole, twin, kvzip.KVzipOptions(budget=0.25, lowering="eager"), chosen)
    found = [step(twin, tokens, cache).logits for tokens in (more[:, :3], more[:, 3:4], more[:, 4:])]
    mask = torch.ones(2, 4, 5, 65, dtype=torch.bool).tril(60)
    mask[..., :60] &= ~hidden[:, :, None]
    model.set_attn_implementation("eager")
    bias = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    expected = step(model, more, cache_of(step(model, ids)), attention_mask=bias).logits
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=2e-4, rtol=2e-4)


def test_a_model_that_prefills_a_prompt_above_the_budget_itself_is_refused() -> None:
    twin = eager(tiny_llama(), method="kvzip", budget=30)
    with pytest.raises(SpecacheError, match="second reading of the prompt, which only `specache eval"):
        step(twin, torch.randint(0, 128, (1, 90)))


def test_attention_that_is_not_seen_is_refused() -> None:
    model = tiny_llama()
    cache = cache_of(step(model, torch.randint(0, 128, (1, 40))))
    model.set_attn_implementation("eager")
    with pytest.raises(SpecacheError, match="0 calls of scaled_dot_product_attention in 2 layers; load the model with"):
        kvzip.chosen(model, cache, torch.zeros(1, 40, dtype=torch.int64), options(budget=8), 0, encode, BEHIND)


def test_an_evaluation_reads_twice_and_keeps_the_budget() -> None:
    model = tiny_llama(vocab_size=256)
    runner = Runner(model, Reader(byte_tokenizer()), batch_size=2, prefills=Prefills())
    ids = torch.randint(0, 256, (2, 80))
    for exact in ((), (1,)):
        with running(model, Setting("kvzip", (("budget", 0.25), ("exact_layers", exact))), "eager"):
            context = ids[0].tolist()
            assert len(runner.answers_apart([(context, [1, 2]), (context, [3])], 3)) == 2
            cache, _ = runner.read(ids)
            kept = [int((layer["kept_token"][0] >= 0).sum()) for layer in session_of(cache).state]
            assert len(kept) == 2 - len(exact)
            assert sum(kept) == len(kept) * 2 * 20, "no layer gets an exact layer's budget"
