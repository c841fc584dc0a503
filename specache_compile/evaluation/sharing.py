"""Share rows among processes: the process that holds a row's lock measures it.

The operating system releases the lock of a process that ends, and another process measures the row. Processes exchange
no messages. Under `accelerate launch` or `torchrun` each rank uses its own device.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from .result_rows import ResultRow, append_row, read_rows

# Seconds between two checks for rows of other processes.
PATIENCE = 0.5


def rank() -> int:
    """The number of this process among those that share the work; 0 for a single process."""
    return int(os.environ.get("RANK", "0"))


def own_device(device: str) -> str:
    """The device of this rank: cuda becomes cuda:LOCAL_RANK."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" and "LOCAL_RANK" in os.environ else device


def shared_rows(
    keys: Sequence[str], path: Path, measure: Callable[[str], ResultRow], progress: Callable[[int], object]
) -> None:
    """Measure the rows that no other process is measuring, and wait until every key has a row in the file `path`.

    progress: receives the number of finished keys.
    """
    while missing := unfinished(keys, path):
        progress(len(keys) - len(missing))
        found_one = False
        for key in missing:
            with claimed(path, key) as mine:
                if mine and key not in read_rows(path):  # another process may have finished it
                    row, found_one = measure(key), True
                    with FileLock(lock_of(path, "append")):
                        append_row(path, row)
                    progress(len(keys) - len(unfinished(keys, path)))
        if not found_one:
            time.sleep(PATIENCE)
    progress(len(keys))


def unfinished(keys: Sequence[str], path: Path) -> list[str]:
    """The keys without a row, in their order."""
    done = read_rows(path)
    return [key for key in keys if key not in done]


@contextlib.contextmanager
def claimed(path: Path, key: str) -> Iterator[bool]:
    """Whether this process may measure the row of `key`, while the context lasts."""
    lock = FileLock(lock_of(path, name_of(key)))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def name_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def lock_of(path: Path, name: str) -> Path:
    folder = path.with_suffix(".locks")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.lock"
