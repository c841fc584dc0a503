"""The copy queue: offloads and prefetches of one session, first in first out, on a worker thread.

Ops find their queue by the number in `cursor[:, QUEUE]`, which the session writes. Number 0 means no queue: the op
copies before it returns. A job reads and writes only state tensors, or memory that it owns.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from specache_compile.kernels.state.cursor import HostRecord, host_record

_numbers = itertools.count(1)
# Held while a copy is submitted to the worker, and during a fork.
_handing = threading.Lock()


@functools.cache
def worker() -> ThreadPoolExecutor:
    """Return the single thread that copies for all sessions, with torch single-threaded in it.

    Otherwise a large copy makes OpenMP create a second team of threads. With more threads than cores, OpenMP puts
    all threads to sleep between kernels, which adds about 60 µs to each later kernel.
    """
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="specache-copy")
    before = torch.get_num_threads()
    pool.submit(torch.get_num_threads).result()  # a thread caches the number at its first query
    pool.submit(torch.set_num_threads, 1).result()
    torch.set_num_threads(before)
    return pool


def hand_over(job: Callable[[], object]) -> Future[None]:
    """Submit `job` to the worker, after all earlier copies."""
    with _handing:
        return worker().submit(run_job, job)


def end_copies() -> None:
    """Wait for all copies before a fork: the child has no worker that would finish them."""
    _handing.acquire()
    if worker.cache_info().currsize:
        worker().submit(int).result()


def restart() -> None:
    """Reset the worker in the child of a fork, which has this process's memory and none of its threads."""
    worker.cache_clear()
    _handing.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=end_copies, after_in_parent=_handing.release, after_in_child=restart)


class CopyQueue(HostRecord):
    """A session's copies in flight.

    error: the error of the first failed copy, after which the tiers are invalid.
    """

    def __init__(self) -> None:
        super().__init__(next(_numbers))
        self.error: BaseException | None = None
        self._prefetches: dict[int, Future[None]] = {}
        self._offloads: deque[Future[None]] = deque()

    def submit_prefetch(self, slots: Tensor, job: Callable[[], object]) -> None:
        """Run `job` after all earlier copies; `wait_for(slots)` waits for it.

        Raises: the error of an earlier prefetch into the same slots, if nothing has waited for that one.
        """
        self.wait_for(slots)
        self._prefetches[slots.data_ptr()] = hand_over(job)

    def submit_offload(self, job: Callable[[], object]) -> None:
        """Run `job` after all earlier copies. Raises: the error of an offload that has ended since."""
        while self._offloads and self._offloads[0].done():
            self._wait(self._offloads[0])
            self._offloads.popleft().result()
        self._offloads.append(hand_over(job))

    def run_now(self, job: Callable[[], object]) -> None:
        """Run `job` on the caller's thread, before queued copies. Raises: the job's error."""
        try:
            run_job(job)
        except Exception as error:
            self.error = self.error or error
            raise

    def wait_for(self, slots: Tensor) -> None:
        """Block until the prefetch into `slots`, if any, is done. Raises: its error."""
        future = self._prefetches.get(slots.data_ptr())
        if future is not None:
            self._wait(future)
            del self._prefetches[slots.data_ptr()]
            future.result()

    def wait_for_offloads(self) -> None:
        """Block until every submitted offload is in the host tier. Raises: the error of a failed one."""
        while self._offloads:
            self._wait(self._offloads[0])
            self._offloads.popleft().result()

    def drain(self) -> None:
        """Block until no copy of this session runs. Raises: the first error, after all copies have ended."""
        self.settle()
        if self.error is not None:
            raise self.error

    def settle(self) -> None:
        """Block until no copy of this session runs; `error` keeps a failure."""
        futures = [*self._prefetches.values(), *self._offloads]
        for future in futures:
            future.exception()
        for future in futures:
            self.error = self.error or future.exception()
        if self.error is None:
            self.wait_for_offloads()
        else:
            # The traceback's frames hold the session, and statistics hold this queue.
            self.error.__traceback__ = None
        self._prefetches.clear()
        self._offloads.clear()

    def _wait(self, future: Future[None]) -> None:
        """Block until a copy is done; after an interrupt, the caller's list still contains the copy."""
        self.error = self.error or future.exception()


def run_job(job: Callable[[], object]) -> None:
    """Run a copy; tests replace this to add a delay or a fault."""
    job()


def queue_of(cursor: Tensor) -> CopyQueue | None:
    """Return the queue of `cursor`, or None if copies run synchronously."""
    record = host_record(cursor)
    return record if isinstance(record, CopyQueue) else None


def after_offloads(run: Callable[..., Any]) -> Callable[..., Any]:
    """Let an op's CPU implementation, which reads the host tier, start after the session's offloads."""
    position = list(inspect.signature(run).parameters).index("cursor")

    def call(*operands: Any) -> Any:
        queue = queue_of(operands[position])
        if queue is not None:
            queue.wait_for_offloads()
        return run(*operands)

    return call
