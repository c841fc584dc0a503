"""The copy queue's guarantees: order, waiting, errors, and termination."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from specache_compile.kernels.movement import copy_queue
from specache_compile.kernels.movement.copy_queue import CopyQueue, after_offloads, queue_of
from specache_compile.kernels.state.cursor import QUEUE, new_cursor

PATIENCE = 10.0  # seconds after which a test that hangs fails instead


class CopyError(Exception):
    """The error of jobs in these tests."""


@pytest.fixture
def queue() -> Iterator[CopyQueue]:
    queue = CopyQueue()
    yield queue
    queue.settle()


@pytest.fixture
def gate(queue: CopyQueue) -> Iterator[threading.Event]:
    """Block the worker until the gate opens."""
    opened = threading.Event()

    def job() -> int:
        assert opened.wait(PATIENCE)
        return 0

    queue.submit_offload(job)
    yield opened
    opened.set()


def slots() -> Tensor:
    return torch.zeros(4)


def fails(message: str = "the copy failed") -> Callable[[], object]:
    def job() -> int:
        raise CopyError(message)

    return job


def notes(log: list[str], name: str) -> Callable[[], None]:
    def job() -> None:
        log.append(name)

    return job


def open_soon(gate: threading.Event, seconds: float = 0.05) -> None:
    threading.Timer(seconds, gate.set).start()


# Order and waiting


def test_copies_run_in_the_order_of_submission(queue: CopyQueue, gate: threading.Event) -> None:
    log: list[str] = []
    guarded = [slots() for _ in range(3)]
    for i in range(3):
        queue.submit_offload(notes(log, f"offload {i}"))
        queue.submit_prefetch(guarded[i], notes(log, f"prefetch {i}"))
    assert log == []
    gate.set()
    queue.drain()
    assert log == [f"{what} {i}" for i in range(3) for what in ("offload", "prefetch")]


def test_order_holds_across_sessions(queue: CopyQueue, gate: threading.Event) -> None:
    log: list[str] = []
    other = CopyQueue()
    queue.submit_offload(notes(log, "first"))
    other.submit_offload(notes(log, "second"))
    queue.submit_offload(notes(log, "third"))
    gate.set()
    queue.drain()
    other.drain()
    assert log == ["first", "second", "third"]


def test_wait_for_returns_when_the_prefetch_into_these_slots_is_done(queue: CopyQueue, gate: threading.Event) -> None:
    log: list[str] = []
    mine = slots()
    queue.submit_prefetch(mine, notes(log, "mine"))
    open_soon(gate)
    queue.wait_for(mine)
    assert log == ["mine"]


def test_wait_for_does_not_wait_for_later_copies(queue: CopyQueue) -> None:
    later = threading.Event()
    mine, others = slots(), slots()
    queue.submit_prefetch(mine, lambda: None)
    queue.submit_prefetch(others, lambda: int(later.wait(PATIENCE)))
    queue.wait_for(mine)
    assert not later.is_set()
    later.set()
    queue.wait_for(others)


def test_wait_for_slots_that_nothing_is_fetched_into_returns_at_once(queue: CopyQueue, gate: threading.Event) -> None:
    queue.submit_prefetch(slots(), lambda: None)
    queue.wait_for(torch.zeros(4))
    assert not gate.is_set()


@pytest.mark.parametrize("finish", [CopyQueue.drain, CopyQueue.settle, CopyQueue.wait_for_offloads])
def test_finishing_waits_for_every_copy(
    queue: CopyQueue, gate: threading.Event, finish: Callable[[CopyQueue], None]
) -> None:
    """Waiting for the offloads alone waits for the fetches before them."""
    log: list[str] = []
    queue.submit_prefetch(slots(), notes(log, "fetched"))
    for i in range(3):
        queue.submit_offload(notes(log, str(i)))
    open_soon(gate)
    finish(queue)
    assert log == ["fetched", "0", "1", "2"]


# Errors


def test_the_next_prefetch_into_the_same_slots_raises_an_error_that_was_not_waited_for(queue: CopyQueue) -> None:
    mine = slots()
    queue.submit_prefetch(mine, fails())
    with pytest.raises(CopyError):
        queue.submit_prefetch(mine, lambda: None)
    assert isinstance(queue.error, CopyError)


def test_the_next_offload_raises_what_an_ended_one_raised(queue: CopyQueue) -> None:
    queue.submit_offload(fails())
    ended = threading.Event()
    copy_queue.worker().submit(ended.set)
    assert ended.wait(PATIENCE)
    with pytest.raises(CopyError):
        queue.submit_offload(lambda: None)
    assert isinstance(queue.error, CopyError)


@pytest.mark.parametrize("submit", ["offload", "prefetch"])
def test_drain_raises_after_all_copies_have_ended(queue: CopyQueue, gate: threading.Event, submit: str) -> None:
    log: list[str] = []
    if submit == "offload":
        queue.submit_offload(fails())
    else:
        queue.submit_prefetch(slots(), fails())
    queue.submit_offload(notes(log, "offload"))
    queue.submit_prefetch(slots(), notes(log, "prefetch"))
    open_soon(gate)
    with pytest.raises(CopyError):
        queue.drain()
    assert log == ["offload", "prefetch"]


def test_the_first_error_stays(queue: CopyQueue) -> None:
    mine, others = slots(), slots()
    queue.submit_prefetch(mine, fails("first"))
    queue.submit_prefetch(others, fails("second"))
    with pytest.raises(CopyError, match="first"):
        queue.wait_for(mine)
    with pytest.raises(CopyError, match="second"):  # each wait raises what its own copy raised
        queue.wait_for(others)
    for _ in range(2):
        with pytest.raises(CopyError, match="first"):
            queue.drain()
    assert str(queue.error) == "first"


@pytest.mark.parametrize("error", [CopyError("x"), MemoryError(), KeyboardInterrupt(), SystemExit()])
def test_settle_never_raises_and_keeps_the_error(queue: CopyQueue, error: BaseException) -> None:
    def job() -> int:
        raise error

    queue.submit_prefetch(slots(), job)
    queue.submit_offload(job)
    queue.settle()
    queue.settle()
    assert queue.error is error


def test_an_error_in_one_session_is_no_error_in_another(queue: CopyQueue) -> None:
    other = CopyQueue()
    queue.submit_offload(fails())
    log: list[str] = []
    other.submit_offload(notes(log, "copied"))
    other.drain()
    queue.settle()
    assert (other.error, log) == (None, ["copied"])


def test_a_fault_put_into_run_job_reaches_every_copy(queue: CopyQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_queue, "run_job", lambda job: fails("injected")())
    queue.submit_offload(lambda: None)
    with pytest.raises(CopyError, match="injected"):
        queue.wait_for_offloads()


# Finding the queue, and its end


def cursor_of(number: int) -> Tensor:
    cursor = new_cursor(torch.device("cpu"), 1)
    cursor[:, QUEUE] = number
    return cursor


def test_the_cursor_names_the_queue_and_zero_names_none(queue: CopyQueue) -> None:
    other = CopyQueue()
    assert queue_of(cursor_of(queue.number)) is queue
    assert queue_of(cursor_of(other.number)) is other
    assert queue_of(cursor_of(0)) is None


def test_an_op_without_a_queue_starts_at_once() -> None:
    assert after_offloads(lambda cursor: "run")(cursor_of(0)) == "run"


@pytest.mark.parametrize("job", [lambda: 1, fails()])
def test_a_dropped_queue_is_freed_with_what_its_copies_held(job: Callable[[], object]) -> None:
    """Also after an error, whose traceback holds the job's frame, and without waits for its copies."""

    def use_a_queue() -> tuple[weakref.ref[CopyQueue], weakref.ref[Tensor], int]:
        queue, big = CopyQueue(), torch.zeros(8)

        def touch() -> int:
            big.add_(1)
            return job()

        queue.submit_prefetch(slots(), touch)
        queue.submit_offload(touch)
        queue.settle()
        return weakref.ref(queue), weakref.ref(big), queue.number

    queue, memory, number = use_a_queue()
    gc.collect()
    assert queue() is None
    assert memory() is None
    with pytest.raises(KeyError):
        queue_of(cursor_of(number))


def test_copies_of_a_dropped_queue_still_end() -> None:
    queue = CopyQueue()
    opened, done = threading.Event(), threading.Event()
    queue.submit_offload(lambda: int(opened.wait(PATIENCE)))
    queue.submit_offload(lambda: done.set() or 0)
    dead = weakref.ref(queue)
    del queue
    gc.collect()
    assert dead() is None
    opened.set()
    assert done.wait(PATIENCE)


def test_the_worker_starts_no_further_threads() -> None:
    """A second team of OpenMP threads would put both teams to sleep between kernels."""
    before = torch.get_num_threads()
    assert copy_queue.worker().submit(torch.get_num_threads).result() == 1
    assert torch.get_num_threads() == before


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_waits_for_running_copies_and_the_child_has_its_own_worker(queue: CopyQueue) -> None:
    mine, log = slots(), list[str]()
    queue.submit_prefetch(mine, lambda: (time.sleep(0.1), mine.fill_(1)))
    queue.submit_offload(lambda: (time.sleep(0.1), notes(log, "parent")()))

    def child() -> None:
        assert (mine[0], log) == (1, ["parent"])
        queue.submit_offload(notes(log, "child"))
        queue.submit_prefetch(mine, lambda: mine.fill_(2))
        queue.drain()
        assert (mine[0], log) == (2, ["parent", "child"])

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(PATIENCE)
    hangs = process.is_alive()
    process.kill()
    assert not hangs
    assert process.exitcode == 0
    queue.submit_offload(notes(log, "after"))
    queue.drain()
    assert log == ["parent", "after"]
