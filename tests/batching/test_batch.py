"""`Batch`: requests that start and end at any step generate what each generates alone, within the memory budget."""

from __future__ import annotations

import random
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import specache_compile as sc
from conftest import compile_copy, compiled_with, new_tokens, prompt, tiny_llama
from specache_compile.batching.batch_memory import Bytes, upper_bound
from specache_compile.batching.request import End, Request
from specache_compile.caches.joining import drop
from specache_compile.errors import SpecacheError
from specache_compile.runtime.session import Session

pytestmark = pytest.mark.one_process

SMALL = {"lowering": "eager", "group_size": 32, "residual_length": 32, "top_k": 8}
CHUNK = 48


@pytest.fixture(scope="module")
def model() -> Any:
    return compiled_with(tiny_llama(), SMALL)


# Of each request its prompt's length and what it asks for: greedy, sampled, penalised, ended by a token.
ASKED: list[tuple[int, dict[str, Any]]] = [
    (110, {"max_new_tokens": 9}),
    (5, {"max_new_tokens": 14, "do_sample": True, "temperature": 0.7, "top_p": 0.9, "seed": 3}),
    (70, {"max_new_tokens": 11, "repetition_penalty": 1.3}),
    (64, {"max_new_tokens": 30, "eos_token_id": list(range(0, 128, 9)), "min_new_tokens": 3, "pad_token_id": 0}),
    (30, {"max_new_tokens": 8, "do_sample": True, "seed": 4}),
]


def run_alone(model: Any, ids: Tensor, chunk: int = CHUNK, **requested: Any) -> Request:
    """Return a request that has run in a batch of its own."""
    batch = sc.Batch(model, chunk=chunk)
    request = batch.add(ids, **requested)
    batch.run()
    return request


def all_free(batch: sc.Batch) -> bool:
    """Whether no page is anybody's, once no prefix is kept."""
    batch.forget_prefixes()
    return batch.memory.pool is not None and batch.memory.pool.held == 0


def test_each_request_generates_what_it_generates_alone(model: Any) -> None:
    """In the default setting, which is lossy: beside others that come, end and are removed at any time, two of them
    between two steps."""
    alone = [run_alone(model, prompt(length, seed=length), **requested) for length, requested in ASKED]
    assert [request.end for request in alone] == [End.LENGTH, End.LENGTH, End.LENGTH, End.STOP, End.LENGTH]
    assert 3 <= len(alone[3].generated) < 30
    assert run_alone(model, prompt(5), max_new_tokens=4, forced_eos_token_id=7).generated[-1] == 7

    batch, chance, requests = sc.Batch(model, chunk=CHUNK), random.Random(1), list[Request]()
    removed = [batch.add(prompt(100, seed=seed), max_new_tokens=100) for seed in (50, 51)]
    heard: dict[Request, list[int]] = {}
    while batch.open or len(requests) < len(ASKED):
        if len(requests) < len(ASKED) and chance.random() < 0.5:
            length, requested = ASKED[len(requests)]
            requests.append(batch.add(prompt(length, seed=length), **requested))
        for request, token in batch.step():
            heard.setdefault(request, []).append(token)
        if len(removed[1].generated) == 6:
            for request in removed:
                batch.remove(request)
    assert [request.end for request in removed] == [End.REMOVED] * 2
    assert len(removed[1].generated) == 6
    for request, expected in zip(requests, alone, strict=True):
        assert (request.generated, request.end) == (expected.generated, expected.end)
        assert heard[request] == request.generated
    assert not batch.decoding


def test_rows_that_are_dropped_have_their_memory_no_more(model: Any) -> None:
    """Their places too, though the cache is still somebody's."""
    batch = sc.Batch(model, chunk=CHUNK, sessions=1)
    batch.add(prompt(40), max_new_tokens=4)
    batch.run()
    (kept,) = batch.memory.prefixes.kept
    tiers = batch.memory.tiers_of(kept.cache)
    places = [weakref.ref(x) for own in tiers.all_rows for name, x in own.items() if name not in MEASURED]
    assert all(place() is not None for place in places)
    drop(kept.cache)
    assert all(place() is None for place in places)


class Failing(LogitsProcessor):
    """Behind so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] >= self.tokens:
            raise RuntimeError("no token is good enough")
        return scores


@pytest.mark.parametrize("tokens", [30, 32], ids=["behind its prompt", "later"])
def test_a_request_that_fails_ends_alone(model: Any, tokens: int) -> None:
    batch = sc.Batch(model, chunk=CHUNK)
    good = batch.add(prompt(40), max_new_tokens=6)
    bad = batch.add(prompt(30), max_new_tokens=6, logits_processor=LogitsProcessorList([Failing(tokens)]))
    batch.run()
    assert (bad.end, len(bad.generated)) == (End.FAILED, tokens - 30)
    assert str(bad.error) == "no token is good enough"
    assert good.generated == new_tokens(model, prompt(40), 6)


def live(batch: sc.Batch) -> Bytes:
    """What is there of the rows' tiers: the pool's pages, and the places of every session."""
    pool = batch.memory.pool
    pages = [(name, tensor) for state in pool.state for name, tensor in state.items()]
    tiers = [each.all_rows for each in pool.tiers]
    places = [x for layers in tiers for layer in layers for name, x in layer.items() if name not in MEASURED]
    host = sum(tensor.nbytes for name, tensor in pages if name == "host")
    return Bytes(sum(tensor.nbytes for _, tensor in pages) - host + sum(x.nbytes for x in places), host)


MEASURED = ("fetched", "corrected")


def test_bytes_stay_within_the_budget_and_are_those_predicted(model: Any) -> None:
    first = sc.Batch(model, chunk=CHUNK)
    first.add(prompt(40), max_new_tokens=1)
    first.step()
    ends, rows = [600, 300, 300, 900], 4
    room = upper_bound(first.options, first.memory.layers, rows, CHUNK, ends[:2], prefixes=rows)
    batch = sc.Batch(model, rows=rows, chunk=CHUNK, device_memory=room.device, host_memory=room.host)
    requests = [batch.add(prompt(20, seed=end), max_new_tokens=end - 20) for end in ends]
    for turn in range(12):
        batch.step()
        pool = batch.memory.pool
        assert pool.bound == 5  # of 256 tokens
        assert pool.held <= 5
        assert room.holds(live(batch))
        assert len(batch.decoding) <= 2
        if turn == 8:
            assert [request.stage.name for request in requests] == ["DECODE", "DECODE", "WAITING", "WAITING"]
            assert pool.held == 2
            for request in requests[:2]:
                batch.remove(request)
            assert pool.held == 0
    assert {requests[2], requests[3]} >= set(batch.open) != set()
    with pytest.raises(SpecacheError, match="9,000 tokens needs 36 pages of 256 tokens, and the pool has 5"):
        batch.add(prompt(8990), max_new_tokens=10)


def test_sessions_are_within_the_budget(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pages are allocated at the start, so other free memory does not limit them."""
    monkeypatch.setattr("specache_compile.batching.batch_memory.free_memory", lambda device: 0)
    rows, chunk, sessions = 4, 128, 3
    first = sc.Batch(model, chunk=chunk)
    first.add(prompt(40), max_new_tokens=1)
    first.step()
    room = upper_bound(
        first.options, first.memory.layers, rows, chunk, [302] * (rows + sessions + 1), prefixes=sessions
    )
    batch = sc.Batch(model, rows=rows, chunk=chunk, device_memory=room.device, host_memory=room.host, sessions=sessions)
    requests = [batch.add(prompt(300, seed=seed), max_new_tokens=2) for seed in range(2 * rows)]
    while batch.open:
        batch.step()
        assert room.holds(live(batch))
    assert [len(prefix.ids) for prefix in batch.memory.prefixes.kept] == [301] * sessions
    assert batch.memory.prefixes.evicted["nowhere"] >= 2 * rows - sessions
    assert [request.end for request in requests] == [End.LENGTH] * 2 * rows


def test_a_beginning_that_was_read_once_is_shared_page_by_page(model: Any) -> None:
    """By requests that come while it is there, and later; each generates what it generates alone, and no page leaks."""
    begins, chunk = prompt(600, seed=9)[0], 128
    prompts = [torch.cat([begins[:520], prompt(length, seed=length)[0]]) for length in (30, 90, 10)]
    expected = [run_alone(model, ids, chunk, max_new_tokens=6) for ids in prompts]
    batch = sc.Batch(model, chunk=chunk)
    requests = [batch.add(prompts[0], max_new_tokens=6)]
    while not requests[0].generated:
        batch.step()
    requests.append(batch.add(prompts[1], max_new_tokens=6))
    batch.step()
    assert requests[1].prefilled == 512 + 98  # the last tokens alone have been read
    assert batch.memory.pool.held == 2 + 1 + 1  # of three pages each, two are shared
    batch.run()
    requests.append(batch.add(prompts[2], max_new_tokens=6))
    batch.run()
    for request, other in zip(requests, expected, strict=True):
        assert request.generated == other.generated
    assert all_free(batch)


def test_lists_of_token_ids_are_accepted_and_unsupported_requests_raise(model: Any) -> None:
    for ids in ([5, 6, 7], [[5, 6, 7]], (5, 6, 7)):
        assert sc.Batch(model).add(ids, max_new_tokens=2).prompt.tolist() == [5, 6, 7]
    batch = sc.Batch(model)
    with pytest.raises(ValueError, match="max_new_tokens is missing"):
        batch.add(prompt(8))
    for unsupported, message in (
        ({"num_beams": 4}, "num_beams=4: a request is one row"),
        ({"stopping": 1}, "unknown arguments: stopping"),
        ({"stop_strings": "."}, r"stop_strings='\.': no request stops there. Call Batch\.remove"),
        ({"token_healing": True}, r"token_healing: .* Pass the ids that model\.heal_tokens returns"),
    ):
        with pytest.raises(ValueError, match=message):
            batch.add(prompt(8), max_new_tokens=3, **unsupported)
    with patch.object(model.generation_config, "token_healing", True):  # a checkpoint's own setting is ignored
        sc.Batch(model).add(prompt(8), max_new_tokens=3)
    with pytest.raises(ValueError, match="the prompt has 0 tokens"):
        batch.add(prompt(0), max_new_tokens=3)
    with pytest.raises(SpecacheError, match=r"a batch does not verify drafts\. Compile with method='offload'"):
        sc.Batch(compiled_with(tiny_llama(), {**SMALL, "verify": 4}))
    with pytest.raises(SpecacheError, match="Pass sessions too"):
        sc.Batch(model, spill_folder=Path("build"))
    with pytest.raises(SpecacheError, match="not compiled with the backend"):
        sc.Batch(tiny_llama())
    assert not batch.open


@pytest.mark.filterwarnings("ignore:specache rewrote 1")
@pytest.mark.parametrize(
    "options",
    [{"method": "snapkv", "budget": 48, "window": 16, "lowering": "eager"}, {**SMALL, "exact_layers": (0,)}],
    ids=["pairs are dropped", "a layer is not held"],
)
def test_rows_that_do_not_join_run_one_after_another(options: dict[str, Any]) -> None:
    """Each has contiguous tiers, and no pages."""
    alone = compiled_with(tiny_llama(), options)
    batch = sc.Batch(alone)
    requests = [batch.add(prompt(length, seed=length), max_new_tokens=5) for length in (60, 20)]
    while batch.open:
        batch.step()
        assert len(batch.running) <= 1
    assert batch.memory.layers
    assert batch.memory.pool is None
    for length, request in zip((60, 20), requests, strict=True):
        assert request.generated == new_tokens(alone, prompt(length, seed=length), 5)


def test_rows_that_cannot_take_a_step_end_with_its_error(model: Any) -> None:
    """Nothing is kept of them, and requests that come later are not affected."""
    batch = sc.Batch(model, chunk=CHUNK, sessions=4)
    requests = [batch.add(prompt(40, seed=seed), max_new_tokens=9) for seed in (1, 2, 3)]
    while len(batch.decoding) < 3:
        batch.step()
    batch.forget_prefixes()
    with patch.object(Session, "reserve", side_effect=SpecacheError("no memory is left")):
        batch.step()
    assert [(request.end, str(request.error)) for request in requests] == [(End.FAILED, "no memory is left")] * 3
    assert not batch.open
    assert not batch.memory.prefixes.kept
    assert run_alone(model, prompt(40, seed=1), max_new_tokens=2).generated == requests[0].generated[:2]
    assert all_free(batch)


def test_a_batch_runs_the_graphs_that_a_generation_has_compiled() -> None:
    """All caches have one layout, so each phase is compiled once."""
    model = compile_copy(tiny_llama(num_hidden_layers=1))
    model.generate(prompt(300), max_new_tokens=4, do_sample=False)
    compiles = sc.stats(model).compiles
    batch = sc.Batch(model)
    batch.add(prompt(280), max_new_tokens=5)
    batch.run()
    model.generate(prompt(290), max_new_tokens=4, do_sample=False)
    assert sc.stats(model).compiles == compiles == 3, (
        "a prefill, a decode before groups leave the window, and one after"
    )
