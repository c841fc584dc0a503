"""The simulated driver, as the Python side calls it."""

from __future__ import annotations

import ctypes
import itertools
import traceback
from collections.abc import Callable

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

_library = ctypes.CDLL("libcuda.so.1")
_library.simulated_is_capturing.argtypes = [ctypes.c_void_p]
_library.simulated_enqueue.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p]
_library.simulated_ranges.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
_library.simulated_ranges.restype = _library.simulated_changes.restype = ctypes.c_long

Run = Callable[[], None]

# Work that streams or graphs hold, by number: what it is, and whether it runs once. What a graph holds stays, since
# nobody tells when a graph is gone.
_work: dict[int, tuple[str, Run, bool]] = {}
_numbers = itertools.count(1)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _called(number: int) -> None:
    """Run a stream's work. The next wait for the device reports an error in it."""
    name, run, once = _work[number]
    if once:
        del _work[number]
    try:
        with _disable_current_modes(), torch.no_grad():
            run()
    except BaseException as error:  # what leaves here is lost: no caller of a stream's work is Python
        traceback.print_exc()
        _library.simulated_fault(f"{name}: {error!r}".encode())


def enqueue(name: str, run: Run) -> None:
    """Run it in its turn on the current stream: now, later, or whenever the graph that is captured is replayed."""
    stream = torch.cuda.current_stream().cuda_stream
    captured = bool(_library.simulated_is_capturing(stream))
    if not captured and not _library.simulated_is_scheduled():
        run()
        return
    number = next(_numbers)
    _work[number] = name, run, not captured
    error = _library.simulated_enqueue(stream, name.encode(), _called, number)
    if error:
        raise RuntimeError(f"CUDA error {error} at the launch of {name}")


def set_schedule(name: str) -> None:
    """The order in which queued work runs from here on: eager, late, early, or random:SEED. RuntimeError where what
    was queued before has failed."""
    if error := _library.simulated_schedule(name.encode()):
        raise RuntimeError(f"CUDA error {error}: queued work has failed")


def set_other_addresses(there: bool) -> None:
    """Whether the device has pinned memory at other addresses than the host from here on."""
    _library.simulated_other_addresses(there)


_known: tuple[int, np.ndarray, np.ndarray] = (-1, np.empty(0, np.uint64), np.empty(0, np.uint64))


def memory_ranges() -> tuple[np.ndarray, np.ndarray]:
    """First addresses and ends of what a kernel may touch: the device's allocations, and pinned memory of the host."""
    global _known
    changes = _library.simulated_changes()
    if _known[0] != changes:
        room = _library.simulated_ranges(None, None, 0)
        starts, ends = np.empty(room, np.uint64), np.empty(room, np.uint64)
        _library.simulated_ranges(starts.ctypes.data, ends.ctypes.data, room)
        _known = changes, starts, ends
    return _known[1], _known[2]
