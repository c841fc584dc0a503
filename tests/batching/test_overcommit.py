"""Requests that give way where pages run out, and come back as they were."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from test_batch import SMALL, all_free, run_alone

import specache_compile as sc
from conftest import compiled_with, prompt, tiny_llama
from specache_compile.batching import spill
from specache_compile.batching.batch_memory import upper_bound
from specache_compile.batching.request import End, Request, Stage

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
    return compiled_with(tiny_llama(), SMALL)


@pytest.fixture(scope="module")
def alone(model: Any) -> list[Request]:
    return [run_alone(model, prompt(length, seed=length), CHUNK, **requested) for length, requested in ASKED]


def small(model: Any, pages: int, folder: Path | None) -> sc.Batch:
    """A batch with room for so many pages, whose device is the host."""
    first = sc.Batch(model, chunk=CHUNK)
    first.add(prompt(40), max_new_tokens=1)
    first.step()
    room = upper_bound(first.options, first.memory.layers, ROWS, CHUNK, [256 * pages])
    assert room.device is not None
    assert room.host is not None
    return sc.Batch(model, rows=ROWS, chunk=CHUNK, host_memory=room.device + room.host, spill_folder=folder)


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
        assert all_free(batch)
        assert not list(tmp_path.glob("*/*"))
    assert most[None] == 2
    assert most[tmp_path] == 3
    assert gave_way


def test_the_last_to_begin_is_preempted_and_may_leave_meanwhile(
    model: Any, alone: list[Request], tmp_path: Path
) -> None:
    batch = small(model, 5, tmp_path)
    requests = [batch.add(prompt(length, seed=length), **requested) for length, requested in ASKED[:3]]
    while batch.open and requests[2].swapped is None:
        batch.step()
    assert [request.stage for request in requests] == [Stage.DECODE, Stage.DECODE, Stage.WAITING]
    assert 0 < len(requests[2].generated) < 30
    batch.remove(requests[2])
    batch.run()
    assert [request.generated for request in requests[:2]] == [request.generated for request in alone[:2]]
    assert all_free(batch)
    assert not list(tmp_path.glob("*/*"))
    del batch
    gc.collect()  # torch does so after each compilation, since Dynamo's errors refer to the calling frames
    assert not list(tmp_path.iterdir())


def test_who_would_never_fit_ends_alone(model: Any, alone: list[Request], tmp_path: Path) -> None:
    """What a layer keeps was not known yet when it was added."""
    batch = small(model, 4, tmp_path)
    first, large = (batch.add(prompt(230, seed=230), max_new_tokens=tokens) for tokens in (60, 5000))
    batch.run()
    assert (first.generated, large.end) == (alone[0].generated, End.FAILED)
    assert "needs 21 pages" in str(large.error)


@pytest.mark.parametrize("name", ["save", "loaded"])
def test_a_preempted_request_without_a_file_generates_its_tokens_all_the_same(
    model: Any, alone: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str], name: str
) -> None:
    """The folder is full, or a file cannot be read: the known tokens are decoded again."""

    def full(*given: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spill, name, full)
    batch = small(model, 5, tmp_path)
    requests = [batch.add(prompt(length, seed=length), **requested) for length, requested in ASKED]
    batch.run()
    assert "No space left" in str(logged)
    assert [request.generated for request in requests] == [request.generated for request in alone]
    assert all_free(batch)
    assert not list(tmp_path.glob("*/*"))
