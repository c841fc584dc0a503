"""Requests that give way where pages run out, and come back as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import specache_compile as sc
from conftest import prompt, tiny_llama
from specache_compile.batching import swapping
from specache_compile.batching.batch_memory import upper_bound
from specache_compile.batching.request import End, Request, Stage
from specache_compile.errors import SpecacheError

pytestmark = pytest.mark.one_process

CHUNK, ROWS = 128, 4
# Of each request its prompt's length and what it asks for: with its answer it needs two pages or three of the five.
ASKED: list[tuple[int, dict[str, Any]]] = [
    (230, {"max_new_tokens": 60}),
    (240, {"max_new_tokens": 40, "do_sample": True, "temperature": 0.7, "seed": 3}),
    (250, {"max_new_tokens": 30}),
    (500, {"max_new_tokens": 50}),
]


@pytest.fixture(scope="module")
def model() -> Any:
    made = tiny_llama()
    options = {"lowering": "eager", "group_size": 32, "residual_length": 32, "top_k": 8}
    made.compile(backend="specache", options=options)
    return made


@pytest.fixture(scope="module")
def alone(model: Any) -> list[Request]:
    requests = []
    for length, requested in ASKED:
        batch = sc.Batch(model, chunk=CHUNK)
        requests.append(batch.add(prompt(length, seed=length), **requested))
        batch.run()
    return requests


def small(model: Any, pages: int, folder: Path | None) -> sc.Batch:
    """A batch with room for so many pages, whose device is the host."""
    first = sc.Batch(model, chunk=CHUNK)
    first.add(prompt(40), max_new_tokens=1)
    first.step()
    room = upper_bound(first.options, first.memory.layers, ROWS, CHUNK, [256 * pages])
    assert room.device is not None
    assert room.host is not None
    return sc.Batch(model, rows=ROWS, chunk=CHUNK, host_memory=room.device + room.host, overcommit=folder)


def until(batch: sc.Batch, came: Callable[[], bool]) -> None:
    for _ in range(400):
        if came():
            return
        batch.step()
    pytest.fail("it never came")


def test_a_preempted_request_generates_what_it_generates_alone(
    model: Any, alone: list[Request], tmp_path: Path
) -> None:
    """In the default setting, which is lossy: its tiers and its choice come back bit for bit. More run at once than
    where each is promised its last page, and nothing is left in the folder or in pages."""
    most, gave_way = {}, set()
    for folder in (None, tmp_path):
        batch = small(model, 5, folder)
        requests = [batch.add(prompt(length, seed=length), **requested) for length, requested in ASKED]
        most[folder] = 0
        for _ in range(400):
            batch.step()
            most[folder] = max(most[folder], len(batch.decoding))
            gave_way |= {place for place, request in enumerate(requests) if request.swapped is not None}
        assert [request.generated for request in requests] == [request.generated for request in alone]
        assert batch.memory.pool is not None
        assert batch.memory.pool.bound == 5
        assert nothing_is_left(batch, tmp_path)
    assert most[None] == 2
    assert most[tmp_path] == 3
    assert gave_way


def nothing_is_left(batch: sc.Batch, folder: Path) -> bool:
    while batch.memory.prefixes.drop_oldest():
        pass
    assert batch.memory.pool is not None
    return batch.memory.pool.held == 0 and not list(folder.glob("*/*"))


@pytest.mark.parametrize("way", ["take", "remove"])
def test_the_last_to_begin_gives_way_and_may_leave_meanwhile(
    model: Any, alone: list[Request], tmp_path: Path, way: str
) -> None:
    batch = small(model, 5, tmp_path)
    requests = [batch.add(prompt(length, seed=length), **requested) for length, requested in ASKED[:3]]
    until(batch, lambda: requests[2].swapped is not None)
    assert [request.stage for request in requests] == [Stage.DECODE, Stage.DECODE, Stage.WAITING]
    said = len(requests[2].generated)
    assert 0 < said < 30
    cache = getattr(batch, way)(requests[2])
    assert cache is None or sc.lengths(cache).tolist() == [250 + said - 1]
    assert (cache is None) == (way == "remove")
    batch.run()
    assert [request.generated for request in requests[:2]] == [request.generated for request in alone[:2]]
    assert nothing_is_left(batch, tmp_path)


@pytest.mark.slow
def test_unused_pages_are_freed_before_a_running_request_is_preempted(
    model: Any, alone: list[Request], tmp_path: Path
) -> None:
    """Unused are a cached prefix, and a further turn that waits with its cache and later generates what it generates
    alone."""
    batch, roomy = small(model, 4, tmp_path), sc.Batch(model, chunk=CHUNK)
    length, more = ASKED[0][0], {"max_new_tokens": 300}
    turns, others = [], []
    for one in (batch, roomy):
        kept = one.add(prompt(300, seed=1), max_new_tokens=4, keep=True)
        one.run()
        others.append(one.add(prompt(length, seed=length), **more))
        until(one, lambda: bool(others[-1].generated))
        ids = torch.cat([kept.ids[0], prompt(400, seed=2)[0]])
        turns.append(one.add(ids, cache=kept.cache, max_new_tokens=5))
        kept.cache = None
    assert batch.memory.prefixes.kept
    until(batch, lambda: turns[0].swapped is not None)
    assert others[0].stage is Stage.DECODE
    assert not batch.memory.prefixes.kept
    batch.run()
    roomy.run()
    assert [turns[0].generated, others[0].generated] == [turns[1].generated, others[1].generated]
    assert others[0].generated[:60] == alone[0].generated
    assert nothing_is_left(batch, tmp_path)


def test_who_would_never_fit_ends_alone(model: Any, alone: list[Request], tmp_path: Path) -> None:
    """What a layer keeps was not known yet when it was added."""
    batch = small(model, 4, tmp_path)
    first, large = (batch.add(prompt(230, seed=230), max_new_tokens=tokens) for tokens in (60, 5000))
    batch.run()
    assert (first.generated, large.end) == (alone[0].generated, End.FAILED)
    assert "needs 21 pages" in str(large.error)


def test_a_request_that_cannot_be_swapped_out_ends_alone(
    model: Any, alone: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is full: the others go on."""

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(swapping, "save", full)
    batch = small(model, 5, tmp_path)
    requests = [batch.add(prompt(length, seed=length), **requested) for length, requested in ASKED]
    batch.run()
    failed = [request for request in requests if request.end is End.FAILED]
    assert failed
    assert all("No space left" in str(request.error) for request in failed)
    assert all(a.generated == b.generated for a, b in zip(requests, alone, strict=True) if a not in failed)
    assert nothing_is_left(batch, tmp_path)


def test_without_a_bound_there_is_nothing_to_overcommit(model: Any, tmp_path: Path) -> None:
    with pytest.raises(SpecacheError, match="overcommit requires a memory budget"):
        sc.Batch(model, overcommit=tmp_path)
