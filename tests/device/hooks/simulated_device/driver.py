"""Python bindings of the simulated driver."""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
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
# The work does not belong to the transforms and traces of the thread that happens to wait for it.
_KEYS = ("Python", "PythonTLSSnapshot", "PythonDispatcher", "FuncTorchDynamicLayerFrontMode",
         "FuncTorchDynamicLayerBackMode", "Functionalize")  # fmt: skip
_OUTSIDE = functools.reduce(operator.or_, (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, k)) for k in _KEYS))

# Work of streams and graphs by number, and whether it runs once. A graph's work stays, since there is no notification
# when a graph is freed.
_work: dict[int, tuple[str, Run, bool]] = {}
_numbers = itertools.count(1)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _called(number: int) -> None:
    """Run a stream's work. The next wait for the device reports an error in it."""
    name, run, once = _work[number]
    if once:
        del _work[number]
    try:
        with _disable_current_modes(), torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(_OUTSIDE):
            run()
    except BaseException as error:  # an error that leaves this function is lost, since the caller is C++
        traceback.print_exc()
        _library.simulated_fault(f"{name}: {error!r}".encode())


def capturing() -> bool:
    return bool(_library.simulated_is_capturing(torch.cuda.current_stream().cuda_stream))


def deferred() -> bool:
    """Return whether work that is queued now runs later."""
    return bool(_library.simulated_is_scheduled()) or capturing()


def enqueue(name: str, run: Run) -> None:
    """Queue work on the current stream: it runs now, later, or in each replay of a captured graph."""
    if not deferred():
        run()
        return
    number = next(_numbers)
    _work[number] = name, run, not capturing()
    error = _library.simulated_enqueue(torch.cuda.current_stream().cuda_stream, name.encode(), _called, number)
    if error:
        raise RuntimeError(f"CUDA error {error} at the launch of {name}")


def set_schedule(name: str) -> None:
    """Set the order of queued work: eager, late, early, or random:SEED.

    Raises: RuntimeError if earlier queued work has failed.
    """
    if error := _library.simulated_schedule(name.encode()):
        raise RuntimeError(f"CUDA error {error}: queued work has failed")


_known: tuple[int, np.ndarray, np.ndarray] = (-1, np.empty(0, np.uint64), np.empty(0, np.uint64))


def memory_ranges() -> tuple[np.ndarray, np.ndarray]:
    """Return starts and ends of the memory that kernels may access: device allocations and pinned host memory."""
    global _known
    changes = _library.simulated_changes()
    if _known[0] != changes:
        room = _library.simulated_ranges(None, None, 0)
        starts, ends = np.empty(room, np.uint64), np.empty(room, np.uint64)
        _library.simulated_ranges(starts.ctypes.data, ends.ctypes.data, room)
        _known = changes, starts, ends
    return _known[1], _known[2]
