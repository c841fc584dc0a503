"""Drafts that are looked up: a widened decode verifies them, and what it rejects leaves no bit behind.
What a widened decode computes is in test_correct.py, beside the formula of a decode."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from test_verify import Stops
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DynamicCache, GenerationConfig, LlamaForCausalLM, StoppingCriteriaList

import specache_compile as sc
from conftest import chatted, compile_copy, compiled_with, greedy, prompt, tiny_llama
from held_tiers import at_hand, differences, held, interrupted_behind
from specache_compile.compat import cache_of, with_cache
from specache_compile.generate.look_up import DRAFTED, LookedUp
from specache_compile.kernels.movement import tier_ops as tiers
from specache_compile.methods import parse_options
from specache_compile.runtime.session import Mode, session_of

pytestmark = [pytest.mark.one_process, pytest.mark.one_trace]


@pytest.fixture(scope="module")
def echo() -> LlamaForCausalLM:
    """It repeats what it has generated, so that a draft is right now and then."""
    return tiny_llama(1, initializer_range=0.1)


@pytest.fixture(scope="module")
def twin(echo: LlamaForCausalLM) -> LlamaForCausalLM:
    """Every pair is fetched: its tokens are the uncompiled model's."""
    return compile_copy(echo, lookup=True)


def verification_of(model: LlamaForCausalLM) -> Any:
    reported = sc.stats(model).verification
    assert reported is not None
    return reported


# Greedy


def test_greedy_tokens_are_the_uncompiled_models_where_every_pair_is_fetched(
    echo: LlamaForCausalLM, twin: LlamaForCausalLM
) -> None:
    counters.clear()
    assert torch.equal(greedy(twin, prompt(75), 120), greedy(echo, prompt(75), 120))
    steps, reported = sc.stats(twin), verification_of(twin)
    assert steps.widened > 0, "drafts were found"
    assert (steps.extends, steps.pre_decodes) == (0, 0), "nothing streams the host tier, and no pass says nothing"
    assert steps.widened + steps.decodes == reported.verifications
    assert round(reported.verifications * reported.tokens_per_verification) == 119, "all but the prefill's"
    assert 0 < reported.acceptance < 1
    assert counters["stats"]["unique_graphs"] == 3, "prefill, decode, extend, whatever the number of drafted tokens"


def test_tokens_are_those_of_one_step_each_while_no_pair_is_chosen_and_none_leaves_the_window(
    echo: LlamaForCausalLM,
) -> None:
    """At one bit, far from the uncompiled model's. 160 cached tokens: the next group leaves the window at 288."""
    requested = {"method": "kivi", "bits": 1, "group_size": 128, "residual_length": 32, "lowering": "eager"}
    ids, made = prompt(161), []
    for options in (requested, {**requested, "lookup": True}):
        model = compiled_with(tiny_llama(1, initializer_range=0.1), options)
        made.append(greedy(model, ids, 100))
    assert verification_of(model).tokens_per_verification > 1
    assert torch.equal(*made)
    assert not torch.equal(made[0], greedy(echo, ids, 100))


def test_a_cache_still_in_16_bits_is_drafted_for_too(echo: LlamaForCausalLM) -> None:
    moves = compile_copy(echo, lookup=True, min_context=110)
    assert torch.equal(greedy(moves, prompt(75), 80), greedy(echo, prompt(75), 80))
    reported = verification_of(moves)
    assert round(reported.verifications * reported.tokens_per_verification) == 79
    assert sc.stats(moves).pairs_corrected > 0, "it has moved over"


@pytest.mark.slow
def test_padding_processors_and_turns(echo: LlamaForCausalLM, twin: LlamaForCausalLM) -> None:
    mask = torch.ones(1, 75, dtype=torch.int64)
    mask[:, :9] = 0
    for given in ({"attention_mask": mask}, {"repetition_penalty": 1.1}):
        assert torch.equal(greedy(twin, prompt(75), 40, **given), greedy(echo, prompt(75), 40, **given)), given

    assert torch.equal(chatted(twin, 30), chatted(echo, 30))
    assert sc.stats(twin).extends == 2, "what a person adds is read exactly"


@pytest.mark.slow
def test_it_stops_where_the_uncompiled_model_does(echo: LlamaForCausalLM, twin: LlamaForCausalLM) -> None:
    """Wherever in a round that token comes: by eos, by a criterion and by length."""
    ids, whole = prompt(75), greedy(echo, prompt(75), 60)
    for place in (20, 41, 57):
        token = int(whole[0, 74 + place])
        for given in (
            {"eos_token_id": token, "pad_token_id": 0},
            {"stopping_criteria": StoppingCriteriaList([Stops(token)])},
        ):
            assert torch.equal(greedy(twin, ids, 60, **given), greedy(echo, ids, 60, **given))
        assert torch.equal(greedy(twin, ids, place), whole[:, : 75 + place])


def test_a_draft_ends_before_what_would_stop_the_generation_and_within_its_length(twin: LlamaForCausalLM) -> None:
    text = torch.tensor([[7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
    for criteria, most, expected in (
        ([], DRAFTED, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ([], 2, [1, 2]),
        ([Stops(3)], DRAFTED, [1, 2]),
        ([Stops(1)], DRAFTED, []),
    ):
        drafts = LookedUp(twin, None, criteria, GenerationConfig(max_length=10_000))
        ids, logits = drafts.draft(text, {}, most)
        assert (ids[0, 12:].tolist(), logits) == (expected, None)


def test_sampling_draws_from_the_models_own_best(echo: LlamaForCausalLM, twin: LlamaForCausalLM) -> None:
    torch.manual_seed(3)
    tokens = twin.generate(prompt(75), max_new_tokens=60, do_sample=True, temperature=0.6, top_k=4)
    assert verification_of(twin).acceptance > 0
    with torch.no_grad():
        best = echo(tokens).logits[0, 74:-1].topk(4).indices
    assert (best == tokens[0, 75:, None]).any(1).all()


# What is not drafted


def test_a_generation_without_drafts_warns_and_decodes_one_token_a_step(
    echo: LlamaForCausalLM, twin: LlamaForCausalLM
) -> None:
    with pytest.warns(sc.SpecacheWarning, match="a batch of one, and this batch has 2. Each step generates one token"):
        assert torch.equal(greedy(twin, prompt(75, 2), 12), greedy(echo, prompt(75, 2), 12))
    reported = sc.stats(twin)
    assert (reported.decodes, reported.widened, reported.extends, reported.verification) == (11, 0, 0, None)


@pytest.mark.slow
def test_a_cache_that_was_made_under_the_other_kind_of_drafts_is_not_drafted_for(
    echo: LlamaForCausalLM, twin: LlamaForCausalLM
) -> None:
    """Decode steps would verify their own drafts, and the counts of bytes would be wrong."""
    expected, exact = greedy(echo, prompt(75), 30), compile_copy(echo, verify=3)
    for first, second in ((twin, exact), (exact, twin)):
        cache = DynamicCache()
        said = greedy(first, prompt(75), 10, **with_cache(cache))
        rounds = verification_of(first).verifications
        with pytest.warns(sc.SpecacheWarning, match="other options"):
            assert torch.equal(greedy(second, said, 20, **with_cache(cache)), expected)
        assert verification_of(second).verifications == rounds


@torch.no_grad()
def test_a_draft_under_a_mask_of_the_callers_own_is_verified_exactly(
    echo: LlamaForCausalLM, twin: LlamaForCausalLM
) -> None:
    """Which hides other tokens from each lane: the decode's ops have one column for all new tokens."""
    seen = torch.ones(1, 1, 4, 79, dtype=torch.bool).tril(75)
    seen[..., 40:50] = False
    logits = []
    for model in (echo, twin):
        out = model(prompt(75), use_cache=True)
        session: Any = session_of(cache_of(out))
        if session is not None:
            session.mode = Mode.VERIFY
        logits.append(model(prompt(4), attention_mask=seen, **with_cache(cache_of(out))).logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert (sc.stats(twin).widened, sc.stats(twin).extends) == (0, 1)


# The tiers

# One layer, whose keys and values no attention has touched, under settings that quantise as they can.
ONE_LAYER = {"setting": "best", "bits": 1, "rotate": True, "top_k": 8, "lookup": True}


def verifies(model: Any, ids: Tensor, cache: Any) -> None:
    """A widened decode of these tokens."""
    session: Any = session_of(cache)
    with session.steps_for(Mode.VERIFY):
        model(ids, **with_cache(cache))


@torch.no_grad()
def test_what_was_rejected_leaves_no_bit_behind() -> None:
    """Drafts of any length at any place of a group, up to the window's: two caches to which other tokens were drafted
    hold the same, those of the tokens accepted."""
    model = compile_copy(tiny_llama(num_hidden_layers=1), **ONE_LAYER)
    ids, position, rng = prompt(500, seed=7), 90, torch.Generator().manual_seed(0)
    ours, others = (cache_of(model(ids[:, :90], use_cache=True)) for _ in range(2))
    for drafted in (1, 6, 10, 31, 10, 32, 5, 10, 40, 10):
        accepted = int(torch.randint(0, drafted + 1, (1,), generator=rng))
        right = ids[:, position : position + accepted + 1]
        for number, cache in enumerate((ours, others)):
            verifies(model, torch.cat([right, prompt(drafted - accepted, seed=number)], 1), cache)
            cache.crop(accepted - drafted)
        position += accepted + 1
        session = at_hand(ours)
        assert session.length == position
        assert differences(held(session), held(at_hand(others))) == []
    assert sc.stats(model).widened == 10


@torch.no_grad()
def test_a_step_that_was_interrupted_half_way_leaves_no_bit_behind(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer has taken 40 tokens into its window of 64, which pushed older ones out; the next layer is interrupted."""
    model = compile_copy(llama, **ONE_LAYER)
    cache = cache_of(model(prompt(95), use_cache=True))
    before, store, layers = held(at_hand(cache)), tiers.store_low_bit, itertools.count()

    def interrupted(*given: Any) -> None:
        if next(layers) == 1:
            raise KeyboardInterrupt
        store(*given)

    with monkeypatch.context() as patch:
        patch.setattr(tiers, "store_low_bit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            verifies(model, prompt(40, seed=3), cache)
    assert differences(held(at_hand(cache)), before) == []


@pytest.mark.slow
def test_an_interruption_anywhere_loses_nothing(echo: LlamaForCausalLM, twin: LlamaForCausalLM) -> None:
    """Behind any step of a generation."""
    interrupted_behind((1, 9, 17, 30), twin, echo, prompt(75), 60)


# Bad input


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"setting": "paper"},
        {"top_k": 0},
        {"top_k": 0, "disable_passes": ("correct",)},
        {"method": "kivi"},
        {"bits": 16},
    ],
)
def test_options_that_are_not_given_are_chosen_to_fit(options: dict[str, Any]) -> None:
    chosen = parse_options({"lookup": True, **options})
    assert not chosen.two_lanes
    assert chosen.correct == ("always" if chosen.top_k else "never")
