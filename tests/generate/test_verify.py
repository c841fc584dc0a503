"""Exact verification: what the compressed cache drafts, the exact pass confirms, and the output is the full cache's."""

from __future__ import annotations

import copy
import functools
import types
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

import specache_compile as sc
from conftest import chatted, compile_copy, eager, greedy, left_padding, prompt, step
from families import BY_NAME
from held_tiers import at_hand, differences, held, interrupted_behind
from specache_compile.compat import CACHE, WINDOWS_TAKE_DRAFTS, cache_of, with_cache
from specache_compile.generate import verify
from specache_compile.generate.compiled_calls import with_compiled_calls
from specache_compile.methods import every_method, parse_options
from specache_compile.runtime.records import Statistics
from specache_compile.runtime.session import Session, session_of

pytestmark = pytest.mark.one_process

# One drafted token in eight is right (1 bit of a random model); groups of 32 tokens, whose borders drafts cross.
LOSSY = {"bits": 1, "top_k": 8}


def verifying(llama: LlamaForCausalLM, **options: Any) -> LlamaForCausalLM:
    return compile_copy(llama, **{**LOSSY, "verify": 6, **options})


def said(stats: Any) -> int:
    """Tokens that verifications generated."""
    return round(stats.verifications * stats.tokens_per_verification)


# Greedy

RIGHT = {"top_k": 1024, "verify": "auto"}


@pytest.mark.quick_for("always right, auto")
@pytest.mark.parametrize("options", [{}, RIGHT], ids=["1 bit", "always right, auto"])
def test_greedy_tokens_are_the_uncompiled_models(llama: LlamaForCausalLM, options: dict[str, Any]) -> None:
    twin, ids = verifying(llama, **options), prompt(75)
    counters.clear()
    assert torch.equal(greedy(twin, ids, 120), greedy(llama, ids, 120))
    stats = sc.stats(twin)
    assert stats.verification.verifications == stats.extends, "each exact pass verified a draft, or was the last token"
    assert said(stats.verification) == 119, "all but the prefill's"
    assert (stats.verification.acceptance == 1) == (options is RIGHT)
    assert counters["stats"]["unique_graphs"] == 3, "prefill, decode, extend, whatever the number of drafted tokens"


@pytest.mark.slow
@torch.no_grad()
def test_in_bfloat16_they_part_at_ties_alone(llama: LlamaForCausalLM) -> None:
    """Where the uncompiled model has two tokens within four steps of bfloat16 of each other."""
    half = copy.deepcopy(llama).bfloat16()
    twin = verifying(half)
    for seed in range(4):
        ids = prompt(75, seed=seed)
        expected, got = greedy(half, ids, 60), greedy(twin, ids, 60)
        apart = (expected != got)[0].nonzero().flatten().tolist()
        if apart:
            logits = half(expected[:, : apart[0]]).logits[0, -1].float()
            two = logits[torch.stack([expected[0, apart[0]], got[0, apart[0]]])]
            assert (two[0] - two[1]).abs() <= 4 * torch.finfo(torch.bfloat16).eps * two.abs().max()
    assert sc.stats(twin).verification.acceptance < 1


@pytest.mark.slow
def test_kcache_drafts_too(llama: LlamaForCausalLM) -> None:
    twin = eager(llama, method="kcache", top_n=4, verify=4)
    assert torch.equal(greedy(twin, prompt(90), 40), greedy(llama, prompt(90), 40))
    assert sc.stats(twin).verification.acceptance < 1


@pytest.mark.quick_for
@pytest.mark.parametrize(
    ("length", "settings"),
    [(70, {}), (235, {}), (235, {"sliding_window": 4096})],
    ids=["in one bucket", "into another", "into another, the window not full"],
)
def test_a_layer_that_slides_gets_back_what_a_draft_pushed_out_of_its_window(
    length: int, settings: dict[str, int]
) -> None:
    """With torch's own settings: its cache of fake tensors has further requirements of late compilations."""
    family = BY_NAME["gemma2"]
    family = replace(family, settings={**family.settings, **settings})
    plain = family.model()
    model = compile_copy(plain, **LOSSY, verify=5)
    with warnings.catch_warnings(), torch._dynamo.config.patch(fake_tensor_cache_enabled=True):
        warnings.simplefilter("ignore", sc.SpecacheWarning)
        assert torch.equal(greedy(model, prompt(length), 40), greedy(plain, prompt(length), 40))
    assert (sc.stats(model).verification is not None) == WINDOWS_TAKE_DRAFTS


@pytest.mark.slow
def test_padding_processors_and_turns(llama: LlamaForCausalLM) -> None:
    twin, ids = verifying(llama), prompt(75)
    processed = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    for given in ({"attention_mask": left_padding(ids, 9)}, processed):
        assert torch.equal(greedy(twin, ids, 25, **given), greedy(llama, ids, 25, **given)), given

    assert torch.equal(chatted(twin, 20), chatted(llama, 20))


def test_every_way_to_compile_is_seen(llama: LlamaForCausalLM) -> None:
    def sees(compiled: Any) -> bool:
        if compiled is not twin:
            compiled = with_compiled_calls(compiled._orig_mod, compiled.dynamo_ctx)
        return verify.is_drafting(compiled)

    for options, expected in (({"verify": 3}, True), ({}, False), (None, False)):
        how = {"backend": "specache", "options": options} if options is not None else {"backend": "eager"}
        twin = copy.deepcopy(llama)
        assert not sees(twin)
        twin.compile(**how)
        assert sees(twin) == expected
        twin = copy.deepcopy(llama)
        twin.forward = torch.compile(twin.forward, **how)
        assert sees(twin) == expected
        twin = copy.deepcopy(llama)
        assert sees(torch.compile(twin, **how)) == expected


class Stops(StoppingCriteria):
    """After a token, whichever else follows it."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] == self.token


@pytest.mark.slow
def test_it_stops_where_the_uncompiled_model_does(llama: LlamaForCausalLM) -> None:
    """Within a draft all of whose tokens are right, and at its ends: by eos, by a criterion and by length."""
    twin, ids = verifying(llama, **RIGHT), prompt(75)
    whole = greedy(llama, ids, 20)
    for place in (1, 5, 6, 12):  # the prefill's; the exact pass's own after four drafted ones; within the next draft
        token = int(whole[0, 74 + place])
        criteria = StoppingCriteriaList([Stops(token)])
        for given in ({"eos_token_id": token, "pad_token_id": 0}, {"stopping_criteria": criteria}):
            assert torch.equal(greedy(twin, ids, 20, **given), greedy(llama, ids, 20, **given))
        assert torch.equal(greedy(twin, ids, place), whole[:, : 75 + place])


# What is not drafted is exact


def test_a_generation_without_drafts_is_exact_and_warns(llama: LlamaForCausalLM) -> None:
    def sampled(model: Any) -> Tensor:
        torch.manual_seed(5)
        criteria = StoppingCriteriaList([Stops(5)])
        return model.generate(prompt(75), max_new_tokens=30, do_sample=True, stopping_criteria=criteria)

    twin = verifying(llama)
    with pytest.warns(sc.SpecacheWarning, match="Stops would stop it one token late"):
        assert torch.equal(sampled(twin), sampled(llama))
    stats = sc.stats(twin)
    assert (stats.decodes, stats.extends > 0, stats.bytes_to_device) == (0, True, 0)
    with pytest.warns(sc.SpecacheWarning, match="a batch of one, and this batch has 2"):
        assert torch.equal(greedy(twin, prompt(80, 2), 12), greedy(llama, prompt(80, 2), 12))
    with pytest.warns(sc.SpecacheWarning, match="drafted.*and a beam search several"):
        assert torch.equal(greedy(twin, prompt(50), 6, num_beams=2), greedy(llama, prompt(50), 6, num_beams=2))


@pytest.mark.slow
def test_a_cache_still_in_16_bits_is_not_drafted_for(llama: LlamaForCausalLM) -> None:
    twin = verifying(llama, min_context=100)
    assert torch.equal(greedy(twin, prompt(80), 45), greedy(llama, prompt(80), 45))
    stats = sc.stats(twin)
    # 80 tokens of prompt; then a step each, of which the twentieth moves the cache over.
    assert said(stats.verification) == 24
    assert stats.decodes > 19


# The tiers


def test_what_was_drafted_and_what_was_rejected_leave_no_bit_behind(llama: LlamaForCausalLM) -> None:
    """Rounds of any length at any place of a group, the longest longer than the window. The accepted tokens are those
    of exact passes on a cache without drafts."""
    twin = verifying(llama, setting="best", bits=1.5)
    ids = prompt(400, seed=7)
    ours, never = (cache_of(step(twin, ids[:, :90])) for _ in range(2))
    rounds = verify.Drafts(twin, LogitsProcessorList(), [], GenerationConfig(max_length=10_000))
    position, rng = 90, torch.Generator().manual_seed(0)
    for drafted in (1, 6, 31, 32, 33, 90, 5):
        before = held(at_hand(ours))
        rounds.session, rounds.cache, rounds.confirmed = session_of(ours), ours, position
        with torch.no_grad():
            rounds.draft(ids[:, : position + 1], {**with_cache(ours)}, drafted)
        assert differences(held(at_hand(ours)), before) == []
        accepted = int(torch.randint(0, drafted + 1, (1,), generator=rng))
        for cache in (ours, never):
            step(twin, ids[:, position : position + drafted + 1], cache)
            cache.crop(accepted - drafted)
        position += accepted + 1
        assert differences(held(at_hand(ours)), held(at_hand(never))) == []


def test_an_interruption_anywhere_loses_nothing(llama: LlamaForCausalLM) -> None:
    """In a draft, before and in a verification."""
    interrupted_behind((3, 8, 9, 17), verifying(llama), llama, prompt(75), 40)


# Sampling


class Chain(LlamaForCausalLM):
    """A Markov chain in a model's place: `exact` [V, V], row a the next token's logits after a; in a draft, those of
    `approximate`. What is under test is the sampling: twenty thousand rounds of a transformer would take minutes."""

    def __init__(self, exact: Tensor, approximate: Tensor) -> None:
        heads = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8}
        super().__init__(LlamaConfig(vocab_size=len(exact), bos_token_id=None, eos_token_id=None, **heads))
        self.exact, self.approximate = exact, approximate
        self.session: Any = types.SimpleNamespace(
            drafting=False, options=parse_options({"verify": 2}), statistics=Statistics(None),
            tiers=types.SimpleNamespace(ranks=None, batch=1),
        )  # fmt: skip
        self.session.drafting_steps = functools.partial(Session.drafting_steps, self.session)

    def forward(self, input_ids: Tensor, **kwargs: Any) -> CausalLMOutputWithPast:  # type: ignore[override]
        pairs = torch.zeros(1, 1, input_ids.shape[1], 1)
        cache = kwargs[CACHE]
        cache.update(pairs, pairs, 0)
        table = self.approximate if self.session.drafting else self.exact
        return CausalLMOutputWithPast(logits=table[input_ids], **with_cache(cache))


@pytest.mark.slow
def test_sampling_has_the_full_caches_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temperature, top-k and top-p together; 20,000 draws, total variation by the token before. The draft's own
    distribution is far from it, and so is a lone token of it."""
    torch.manual_seed(0)
    vocabulary, draws = 6, 20_000
    chain = Chain(1.5 * torch.randn(vocabulary, vocabulary), 1.5 * torch.randn(vocabulary, vocabulary))
    chain.approximate = 0.6 * chain.exact + 0.6 * chain.approximate
    verify.route_verification()
    monkeypatch.setattr(verify, "sessions_of", lambda cache: [chain.session])
    monkeypatch.setattr(verify, "is_drafting", lambda model: True)
    given = {"do_sample": True, "temperature": 1.4, "top_k": 5, "top_p": 0.9}
    tokens = chain.generate(torch.zeros(1, 1, dtype=torch.long), max_new_tokens=draws, **given)[0]
    assert 0.2 < chain.session.statistics.accepted / chain.session.statistics.drafted < 0.9

    def processed(table: Tensor) -> Tensor:
        config = GenerationConfig(**given)
        processors = chain._get_logits_processor(config, input_ids_seq_length=1, device="cpu", model_kwargs={})
        return processors(torch.zeros(vocabulary, 1, dtype=torch.long), table.clone()).softmax(-1)

    seen = torch.zeros(vocabulary, vocabulary)
    seen.index_put_((tokens[:-1], tokens[1:]), torch.ones(draws), accumulate=True)
    share = seen.sum(1) / draws

    def variation(expected: Tensor) -> float:
        return float((share * 0.5 * (seen / seen.sum(1, keepdim=True) - expected).abs().sum(1)).sum())

    assert variation(processed(chain.exact)) < 0.02
    assert variation(processed(chain.approximate)) > 0.1


def test_sampling_on_a_compiled_model(llama: LlamaForCausalLM) -> None:
    """A draft that is always right is always accepted, and what is sampled ends at eos."""
    twin, ids = verifying(llama, **RIGHT), prompt(75)
    torch.manual_seed(3)
    given = {"do_sample": True, "temperature": 1.2, "top_k": 20, "top_p": 0.95}
    tokens = twin.generate(ids, max_new_tokens=60, **given)
    assert sc.stats(twin).verification.acceptance > 0.99
    best = step(llama, tokens).logits[0, 74:-1].topk(20).indices
    assert (best == tokens[0, 75:, None]).any(1).all(), "each of the exact pass's twenty best"
    ended = twin.generate(ids, max_new_tokens=300, eos_token_id=list(range(0, 128, 8)), pad_token_id=0, **given)[0, 75:]
    assert (ended % 8 == 0).nonzero().flatten().tolist() == [len(ended) - 1]


def test_auto_drafts_more_tokens_while_all_are_accepted() -> None:
    session: Any = types.SimpleNamespace(statistics=Statistics(None))
    drafts, lengths = verify.Drafts(None, [], [], None), list[int]()
    drafts.session = session
    for accepted in (8, 10, 5, *[0] * 12, *range(1, 200, 2)):
        drafts.drafted = drafts.auto
        drafts.update_candidate_strategy(torch.empty(0), torch.empty(0), accepted)
        lengths.append(drafts.auto)
    assert lengths[:15] == [10, 12, *range(11, 0, -1), 1, 1]
    assert lengths[-1] == verify.MOST
    assert session.statistics.rounds == len(lengths)


# Bad input


@pytest.mark.parametrize("method", every_method())
def test_methods_that_approximate_a_cache_that_is_whole_verify(method: str) -> None:
    if method in ("specache", "pages", "kivi", "kcache"):
        assert parse_options({"method": method, "verify": 8}).verify == 8
        return
    why = "is exact" if method in ("full", "offload") else "keeps no exact copy of all pairs"
    with pytest.raises(sc.OptionError, match=why):
        parse_options({"method": method, "verify": 8})


@pytest.mark.filterwarnings("error")
def test_a_cache_is_passed_and_read_without_a_warning_under_every_versions_name(llama: LlamaForCausalLM) -> None:
    cache, ids = DynamicCache(config=llama.config), prompt(9)
    assert cache_of(llama(ids, **with_cache(cache), use_cache=True)) is cache
    out = greedy(llama, prompt(12), 3, **with_cache(cache), return_dict_in_generate=True)
    assert cache_of(out) is cache
    assert cache.get_seq_length() == 14
