"""The copy queue: offloads and prefetches of one session, first in first out, on a worker thread.

The ops find their queue by the number that the session writes into `cursor[:, QUEUE]`; number 0 means no queue,
and the copy is done before the op returns. A job reads and writes state tensors only, or memory it owns.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from specache_compile.kernels.state.cursor import QUEUE

_numbers = itertools.count(1)
_queues: weakref.WeakValueDictionary[int, CopyQueue] = weakref.WeakValueDictionary()
# Held where a copy is handed to the worker, and by a process that forks.
_handing = threading.Lock()


@functools.cache
def worker() -> ThreadPoolExecutor:
    """The one thread that copies for all sessions, and torch single-threaded in it.

    Otherwise a large copy makes OpenMP keep a second team of threads. With more threads than cores OpenMP puts every
    thread to sleep between kernels, the model's too, which costs each later kernel some 60 µs.
    """
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="specache-copy")
    before = torch.get_num_threads()
    pool.submit(torch.get_num_threads).result()  # a thread that has not asked takes the process's number later
    pool.submit(torch.set_num_threads, 1).result()
    torch.set_num_threads(before)
    return pool


def hand_over(job: Callable[[], object]) -> Future[None]:
    """Have the worker run `job` behind all earlier copies."""
    with _handing:
        return worker().submit(run_job, job)


def end_copies() -> None:
    """Before a fork: the child has no worker that would end what is under way, and its half of a copy is lost."""
    _handing.acquire()
    if worker.cache_info().currsize:
        worker().submit(int).result()


def restart() -> None:
    """In the child of a fork, which has this process's memory and none of its threads."""
    worker.cache_clear()
    _handing.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=end_copies, after_in_parent=_handing.release, after_in_child=restart)


class CopyQueue:
    """A session's copies in flight, and what they have cost so far.

    number: by which ops find the queue.
    waited: seconds that steps stood still for copies.
    correcting: seconds that steps stood still for corrections.
    error: the first failed copy's, after which the tiers can no longer be trusted.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.waited = 0.0
        self.correcting = 0.0
        self.error: BaseException | None = None
        self._prefetches: dict[int, Future[None]] = {}
        self._offloads: deque[Future[None]] = deque()
        _queues[self.number] = self

    def submit_prefetch(self, slots: Tensor, job: Callable[[], object]) -> None:
        """Run `job` behind all earlier copies; `wait_for(slots)` waits for it.

        Raises what an earlier prefetch into the same slots raised, if nobody has waited for that one.
        """
        self.wait_for(slots)
        self._prefetches[slots.data_ptr()] = hand_over(job)

    def submit_offload(self, job: Callable[[], object]) -> None:
        """Run `job` behind all earlier copies. Raises what an offload that has ended meanwhile raised."""
        while self._offloads and self._offloads[0].done():
            self._wait(self._offloads[0])
            self._offloads.popleft().result()
        self._offloads.append(hand_over(job))

    def run_now(self, job: Callable[[], object]) -> float:
        """Run `job` on the caller's thread; other copies are overtaken. Returns seconds; raises what it raised."""
        start = time.perf_counter()
        try:
            run_job(job)
        except Exception as error:
            self.error = self.error or error
            raise
        return time.perf_counter() - start

    def wait_for(self, slots: Tensor) -> None:
        """Block until the prefetch into `slots` is done; raises what it raised. No prefetch under way: no wait."""
        future = self._prefetches.get(slots.data_ptr())
        if future is not None:
            self._wait(future)
            del self._prefetches[slots.data_ptr()]
            future.result()

    def wait_for_offloads(self) -> None:
        """Block until every offload handed in so far is in the host tier; raises what one raised."""
        while self._offloads:
            self._wait(self._offloads[0])
            self._offloads.popleft().result()

    def drain(self) -> None:
        """Block until no copy of this session is under way; raises the first error, after all have ended."""
        self.settle()
        if self.error is not None:
            raise self.error

    def settle(self) -> None:
        """Block until no copy of this session is under way; a failure is kept in `error`."""
        futures = [*self._prefetches.values(), *self._offloads]
        for future in futures:
            future.exception()
        for future in futures:
            self.error = self.error or future.exception()
        if self.error is None:
            self.wait_for_offloads()
        else:
            # The frames that it came through hold the session, which statistics that keep this queue would keep.
            self.error.__traceback__ = None
        self._prefetches.clear()
        self._offloads.clear()

    def _wait(self, future: Future[None]) -> None:
        """Until a copy is done; interrupted, whoever has it in a list has it there still."""
        start = time.perf_counter()
        self.error = self.error or future.exception()
        self.waited += time.perf_counter() - start


def run_job(job: Callable[[], object]) -> None:
    """What runs for every copy; tests put a delay or a fault here."""
    job()


def queue_of(cursor: Tensor) -> CopyQueue | None:
    """The queue that `cursor` names, or None where copies are to be done at once."""
    number = int(cursor[0, QUEUE])
    return _queues[number] if number else None


def wait_for_offloads(cursor: Tensor) -> None:
    """Before an op reads the host tier: every pair that the session has sent there must have arrived."""
    queue = queue_of(cursor)
    if queue is not None:
        queue.wait_for_offloads()
