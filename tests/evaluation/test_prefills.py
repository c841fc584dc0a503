"""Prefills that methods share: read once, and the same answers and distances as behind each method's own."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from conftest import byte_tokenizer, tiny_llama
from families import ALTERNATE, BY_NAME
from specache_compile.evaluation.reader import Reader
from specache_compile.evaluation.runner import Prefill, Prefills, Runner
from specache_compile.evaluation.settings import parse_setting, running
from specache_compile.runtime.held import HeldTensor

BYTES = Reader(byte_tokenizer())
GROUPS = "group_size=32,residual_length=32"
METHODS = (
    "uncompiled",
    f"specache:bits=1,{GROUPS},top_k=8",
    f"kivi:bits=2,{GROUPS}",
    "fp8",
    "snapkv:budget=48",
    "h2o:budget=48",
)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(vocab_size=256)


@pytest.fixture(scope="module")
def gemma() -> Any:
    """Return a model with a sliding layer before one that keeps every pair."""
    return replace(BY_NAME["gemma3_text"], settings={**ALTERNATE, "vocab_size": 256}).model()


@pytest.fixture(scope="module")
def shared(model: Any) -> Runner:
    return Runner(model, BYTES, batch_size=2, prefills=Prefills())


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


@pytest.mark.quick_for("uncompiled", "kivi:bits=2,group_size=32,residual_length=32")
@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_behind_a_methods_own_prefill(model: Any, shared: Runner, method: str) -> None:
    requested = prompts(150, 150, 150, 90, 40, 20)
    with running(model, parse_setting(method), "eager"):
        assert shared.answers(requested, 12) == Runner(model, BYTES, batch_size=2).answers(requested, 12)
        assert shared.answers(requested, 1) == Runner(model, BYTES, batch_size=2).answers(requested, 1)


def test_an_answer_that_ends_with_its_first_token_has_no_more(model: Any, shared: Runner) -> None:
    [prompt] = requested = prompts(60)
    first = int(model(torch.tensor([prompt])).logits[0, -1].argmax())
    with patch.object(model.generation_config, "eos_token_id", first):
        assert shared.continued_from_prefills(torch.tensor(requested), 5) == [[first]]


def test_a_prompt_is_read_once_for_all_methods_that_read_it_exactly(model: Any) -> None:
    runner, read = Runner(model, BYTES, prefills=Prefills()), []
    with model.register_forward_pre_hook(
        lambda _, args, given: read.append((args[0] if args else given["input_ids"]).shape[1]), with_kwargs=True
    ):
        for method in METHODS:
            with running(model, parse_setting(method), "eager"):
                runner.answers(prompts(100), 2)
    assert read.count(100) == 2, "once, and once by the method that drops pairs as it reads"


def test_the_next_cell_begins_with_none_and_no_more_are_kept_than_fit() -> None:
    prefills, read = Prefills(most=64 * 10), []

    def make(ids: torch.Tensor) -> Prefill:
        """Return one of a row and a layer, 64 bytes a token."""
        read.append(tokens := ids.shape[1])
        cache = DynamicCache()
        cache.update(torch.zeros(1, 1, tokens, 8), torch.zeros(1, 1, tokens, 8), 0)
        return Prefill(cache, torch.zeros(1, 1, 4), torch.zeros(1, 1, dtype=torch.int64))

    for cell in ("needle 512", "needle 512", "needle 1024"):
        prefills.begin(cell)
        for length in (8, 3, 2):
            prefills.of(ids := torch.zeros(1, length, dtype=torch.int64), lambda ids=ids: make(ids))
    assert read == [8, 3, 2, 3, 8, 3, 2], "three tokens beside eight are too many"


def test_a_first_token_is_what_the_models_configuration_makes_of_the_logits(model: Any, shared: Runner) -> None:
    requested = prompts(70)
    with patch.object(model.generation_config, "repetition_penalty", 5.0):
        ours, own = (Runner(model, BYTES, prefills=p).answers(requested, 6) for p in (Prefills(), None))
    assert ours == own != shared.answers(requested, 6)


def test_a_model_of_sliding_windows_alone_reads_for_itself() -> None:
    assert not Prefills().can_continue(BY_NAME["mistral, sliding"].model())
    assert Prefills().can_continue(BY_NAME["mistral"].model())


def test_snapkv_prefills_by_itself_where_its_windows_queries_are_not_seen(model: Any) -> None:
    with running(model, parse_setting("snapkv:window=65"), "eager"):
        assert not Prefills().can_continue(model)
    alibi = BY_NAME["falcon, alibi"].model()
    with running(alibi, parse_setting("snapkv"), "eager"):
        assert not Prefills().can_continue(alibi), "the bias would be missing from its choice"
    eager = tiny_llama()
    eager.set_attn_implementation("eager")
    with running(eager, parse_setting("snapkv"), "eager"):
        assert not Prefills().can_continue(eager)


@pytest.mark.quick_for("uncompiled", f"specache:bits=1,{GROUPS},top_k=8")
@pytest.mark.parametrize("method", METHODS[:5])
def test_sliding_layers_stay_plain_behind_a_shared_prefill(gemma: Any, method: str) -> None:
    shared, own = Runner(gemma, BYTES, prefills=Prefills()), Runner(gemma, BYTES)
    requested = torch.tensor(prompts(150))
    with running(gemma, parse_setting(method), "eager"):
        assert shared.shares
        assert shared.answers(requested.tolist(), 12) == own.answers(requested.tolist(), 12)
        torch.testing.assert_close(shared.forced_logits(requested, 120), own.forced_logits(requested, 120))
        cache, _ = shared.read(requested)
    assert type(cache.layers[0]) is DynamicSlidingWindowLayer
    assert cache.layers[0].keys.untyped_storage().nbytes() == cache.layers[0].keys.nbytes
    assert isinstance(cache.layers[1].keys, HeldTensor) == (method != "uncompiled")


def test_a_prefill_in_chunks_is_that_of_the_whole_prompt(gemma: Any) -> None:
    requested = torch.tensor(prompts(150))
    whole, runner = Runner(gemma, BYTES, prefills=Prefills()).prefilled(requested), Runner(gemma, BYTES)
    with patch.object(gemma.generation_config, "prefill_chunk_size", 40):
        chunked = Runner(gemma, BYTES, prefills=Prefills()).prefilled(requested)
        read, _ = runner.read(requested)
    for other in (chunked.cache, read):
        for layer, expected in zip(other.layers, whole.cache.layers, strict=True):
            torch.testing.assert_close(layer.keys, expected.keys)
    torch.testing.assert_close((chunked.logits, chunked.queries), (whole.logits, whole.queries))


def test_a_policy_that_evicts_block_by_block_prefills_in_chunks(model: Any) -> None:
    requested, results = torch.tensor(prompts(150)), []
    for block, chunk in ((24, None), (60, 24)):
        runner = Runner(model, BYTES, prefills=Prefills(chunk=chunk))
        with running(model, parse_setting(f"h2o:budget=48,eviction_block={block}"), "eager"):
            results.append((runner.forced_logits(requested, 130), runner.answers(requested.tolist(), 12)))
    torch.testing.assert_close(*[logits for logits, _ in results])
    assert results[0][1] == results[1][1]
    whole = "h2o:budget=48,eviction_block=prompt", "h2o:budget=0.5,eviction_block=9", "snapkv:budget=48"
    for method in whole:
        with running(model, parse_setting(method), "eager"):
            assert runner.chunk is None, "a first chunk would be taken for the prompt"
