"""`Batch(sessions=N)`: a prompt continues what finished requests have cached, in memory or on disk."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from test_batch import all_free
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import LlamaForCausalLM

import specache_compile as sc
from conftest import compiled_with, eager, new_tokens, prompt
from families import BY_NAME
from specache_compile.batching import batch_memory
from specache_compile.batching.batch_memory import upper_bound
from specache_compile.batching.request import Request, Stage
from specache_compile.kernels.state.page_table import PAGE
from specache_compile.paging.pool import PagePool, pages_for
from specache_compile.runtime.session import required_session

pytestmark = pytest.mark.one_process

NEW = 4


def answer(batch: sc.Batch, ids: Tensor, reused: int | None = None) -> Request:
    """Run one request, of which so many tokens are reused."""
    request = batch.add(ids, max_new_tokens=NEW)
    batch.run()
    assert request.error is None
    assert reused in (None, request.reused)
    return request


def turn(request: Request, seed: int = 9) -> Tensor:
    """The prompt of a further turn."""
    return torch.cat([request.ids[0], prompt(20, seed=seed)[0]])


def lengths(batch: sc.Batch) -> list[tuple[int, bool]]:
    """Of each session its tokens, and whether it is in memory."""
    return [(len(prefix.ids), prefix.cache is not None) for prefix in batch.memory.prefixes.kept]


@pytest.mark.parametrize("length", [60, 300])
def test_a_further_turn_computes_its_own_tokens_alone(
    compiled: LlamaForCausalLM, llama: LlamaForCausalLM, length: int
) -> None:
    """So do the last turn again, and a question behind the same system prompt, which leave the session as it is."""
    batch = sc.Batch(compiled, sessions=4)
    first = answer(batch, prompt(length)[0], 0)
    second = answer(batch, turn(first), length + NEW - 1)
    assert lengths(batch) == [(length + 20 + 2 * NEW - 1, True)], "it has replaced the first turn's"
    graphs = counters["stats"]["unique_graphs"]
    again = answer(batch, second.prompt, len(second.prompt) - 1)
    assert counters["stats"]["unique_graphs"] == graphs, "its last token takes the graph of a decode step"
    other = answer(batch, torch.cat([first.prompt[: length - 9], prompt(20, seed=5)[0]]), length - 9)
    third = answer(batch, turn(second), len(second.prompt) + NEW - 1)
    fourth = answer(batch, turn(other), len(other.prompt) + NEW - 1)
    for request in (first, second, again, other, third, fourth):
        assert request.generated == new_tokens(llama, request.prompt[None], NEW)
    answer(batch, torch.cat([first.prompt[:20], prompt(40, seed=6)[0]]), 0)  # too few tokens for a copy
    assert all_free(batch)


def test_equal_prompts_of_waiting_requests_are_prefilled_once(
    compiled: LlamaForCausalLM, llama: LlamaForCausalLM
) -> None:
    batch = sc.Batch(compiled, sessions=2)
    requests = [batch.add(prompt(PAGE + 50)[0], max_new_tokens=NEW) for _ in range(3)]
    batch.run()
    assert [request.reused for request in requests] == [0, PAGE + 49, PAGE + 49]
    assert [request.generated for request in requests] == [new_tokens(llama, requests[0].prompt[None], NEW)] * 3


def test_a_removed_request_is_continued_too(compiled: LlamaForCausalLM, llama: LlamaForCausalLM) -> None:
    """Removed while its prompt is prefilled, or later."""
    batch = sc.Batch(compiled, sessions=4, chunk=48)
    answer(batch, prompt(5, seed=3)[0])
    for steps, cached in ((1, 48), (4, 101)):
        request = batch.add(prompt(100, seed=steps)[0], max_new_tokens=9)
        for _ in range(steps):
            batch.step()
        batch.remove(request)
        again = answer(
            batch, torch.cat([prompt(100, seed=steps)[0], torch.tensor(request.generated, dtype=torch.int64)]), cached
        )
        assert again.generated == new_tokens(llama, again.prompt[None], NEW)


@pytest.mark.parametrize("kind", ["dropped pairs", "a window"])
def test_a_cache_that_cannot_be_cut_is_continued_whole_or_not_at_all(llama: LlamaForCausalLM, kind: str) -> None:
    """Pairs of tokens that are still needed may be gone."""
    plain = BY_NAME["gemma2"].model() if kind == "a window" else llama
    model = eager(plain) if kind == "a window" else eager(plain, method="h2o", budget=0.5)
    batch = sc.Batch(model, sessions=4)
    first = answer(batch, prompt(60)[0], 0)
    answer(batch, first.prompt, 0)
    second = answer(batch, turn(first), 60 + NEW - 1)
    if kind == "a window":
        assert second.generated == new_tokens(plain, second.prompt[None], NEW)


def test_a_turn_that_fills_the_memory_continues_its_session(llama: LlamaForCausalLM) -> None:
    """Of a model without pages. A request that must wait drops no session."""
    model = eager(llama, method="h2o", budget=0.5)
    probe = sc.Batch(model)
    answer(probe, prompt(5)[0])
    room = probe.memory.unpaged([60 + 20 + 2 * NEW])
    batch = sc.Batch(model, sessions=4, host_memory=room.host, device_memory=room.device)
    first = answer(batch, prompt(60)[0], 0)
    running, waiting = (batch.add(ids, max_new_tokens=NEW) for ids in (turn(first), prompt(60, seed=2)))
    batch.step()
    batch.step()
    assert (running.reused, waiting.stage) == (63, Stage.WAITING)
    batch.run()
    assert len(waiting.generated) == NEW


def test_the_least_recently_used_session_is_evicted_first(
    compiled: LlamaForCausalLM, llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    """To the folder, if there is one, which is bounded too and ends with the batch."""
    batch = sc.Batch(compiled, sessions=2, spill_folder=tmp_path, spill_bytes=1 << 30)
    first, second, third = (answer(batch, prompt(40 + seed, seed=seed)[0], 0) for seed in (1, 2, 3))
    assert lengths(batch) == [(44, False), (45, True), (46, True)]
    back = answer(batch, turn(first), 44)
    assert back.generated == new_tokens(llama, back.prompt[None], NEW)
    assert lengths(batch) == [(45, False), (46, True), (68, True)]
    answer(batch, torch.cat([second.prompt[:30], prompt(9, seed=7)[0]]), 30)
    assert lengths(batch)[-2:] == [(45, False), (42, True)], "a part of it was read"
    batch.spill.most_bytes = 0
    answer(batch, turn(third), 46)
    assert all(in_memory for _, in_memory in lengths(batch))
    assert batch.memory.prefixes.evicted["disk"] >= 3
    assert not list(tmp_path.glob("*/*"))
    nowhere = sc.Batch(compiled, sessions=1)
    for seed in (1, 2):
        answer(nowhere, prompt(40, seed=seed)[0])
    assert nowhere.memory.prefixes.evicted == {"nowhere": 1}
    batch.spill.close()  # as at the end of the process, or of the server
    assert not list(tmp_path.iterdir())


def test_sessions_give_their_pages_to_requests(
    compiled: LlamaForCausalLM, llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    """A request that fills the memory starts, and the session that went to disk is continued."""
    probe = sc.Batch(compiled)
    answer(probe, prompt(40)[0])
    room = upper_bound(probe.options, probe.memory.layers, 2, 512, [4 * PAGE], prefixes=4)
    batch = sc.Batch(compiled, rows=2, sessions=4, spill_folder=tmp_path, host_memory=int(room.device + room.host))
    first = answer(batch, prompt(300)[0], 0)
    assert batch.memory.pool.bound == 4
    long = batch.add(prompt(4 * PAGE - NEW, seed=2)[0], max_new_tokens=NEW)
    batch.run()
    assert long.generated == new_tokens(llama, long.prompt[None], NEW)
    assert lengths(batch)[0] == (303, False)
    second = answer(batch, turn(first), 303)
    assert second.generated == new_tokens(llama, second.prompt[None], NEW)


@pytest.mark.parametrize("options", [{}, {"method": "h2o", "budget": 0.5, "lowering": "eager"}], ids=["pages", "none"])
def test_sessions_give_their_host_memory_to_requests_where_there_is_no_budget(
    llama: LlamaForCausalLM, compiled: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Of three sessions one goes, with or without pages."""
    batch = sc.Batch(compiled_with(llama, options) if options else compiled, sessions=4)
    for seed in range(3):
        answer(batch, prompt(20 + 10 * seed, seed=seed)[0])
    if (pool := batch.memory.pool) is not None:
        monkeypatch.setattr(PagePool, "room_on_host", lambda pool: pool.backed)
        others = pool.backed - pool.first - 1 - pool.held  # one page is free
        monkeypatch.setattr(PagePool, "held", property(lambda pool: len(pool.counts) + others))
    monkeypatch.setattr(batch_memory, "allowance", lambda *_: (1 << 30) * (len(lengths(batch)) < 3))
    batch.add(prompt(300, seed=7)[0], max_new_tokens=NEW)
    batch.step()
    assert lengths(batch)[:2] == [(33, True), (43, True)]
    batch.run()


def test_an_unreadable_session_is_prefilled_again(
    compiled: LlamaForCausalLM, llama: LlamaForCausalLM, tmp_path: Path, logged: list[str]
) -> None:
    batch = sc.Batch(compiled, sessions=1, spill_folder=tmp_path)
    first, _ = (answer(batch, prompt(60, seed=seed)[0]) for seed in (1, 2))
    tensors = next(tmp_path.rglob("000.pt"))
    tensors.write_bytes(tensors.read_bytes()[:-8])
    second = answer(batch, turn(first), 0)
    assert second.generated == new_tokens(llama, second.prompt[None], NEW)
    assert "is prefilled again" in str(logged)


def test_a_session_that_cannot_be_written_is_dropped_with_a_warning(
    compiled: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr("specache_compile.caches.saving.save", Mock(side_effect=RuntimeError("can't allocate memory")))
    batch = sc.Batch(compiled, sessions=1, spill_folder=tmp_path)
    for seed in (1, 2):
        answer(batch, prompt(40, seed=seed)[0])
    assert "can't allocate memory" in str(logged)
    assert lengths(batch) == [(43, True)]


@torch.no_grad()
def test_a_change_of_the_weights_forgets_sessions(
    compiled: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory, on disk, and of a request that runs at the change."""
    monkeypatch.setitem(compiled.model._modules, "norm", copy.deepcopy(compiled.model.norm))
    batch = sc.Batch(compiled, sessions=1, spill_folder=tmp_path)
    first, second = (answer(batch, prompt(60, seed=seed)[0]) for seed in (1, 2))
    assert lengths(batch) == [(63, False), (63, True)]
    running = batch.add(prompt(50, seed=3)[0], max_new_tokens=30)
    batch.step()
    compiled.model.norm.weight.data.mul_(2.0)
    for request in (first, second):
        answer(batch, turn(request), 0)
    assert not list(tmp_path.glob("*/*/*")) or len(batch.memory.prefixes.kept) == 2
    batch.run()
    answer(batch, turn(running), 0)


@pytest.mark.parametrize("host_bits", [8, 16])
@pytest.mark.parametrize("shared", [522, 600])
def test_the_pages_that_admission_counts_are_those_that_a_request_needs(
    llama: LlamaForCausalLM, host_bits: int, shared: int
) -> None:
    """A prefix is cropped to the shared tokens; codes of its last group may then be written again."""
    model = eager(llama, host_bits=host_bits, min_context=0, top_k=16)
    batch = sc.Batch(model, sessions=4, rows=1)
    first = answer(batch, prompt(900)[0])
    request = batch.add(torch.cat([first.ids[0, :shared], prompt(20, seed=9)[0]]), max_new_tokens=NEW)
    memory = batch.memory
    counted = pages_for(request.longest) - len(memory.shared_pages(request))
    memory.attach_prefix(request, model)
    required_session(request.cache)
    assert request.reused == shared
    assert memory.pages_needed(request, request.cache, 0, request.longest) == counted
