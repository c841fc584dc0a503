"""Memory of the host tier: pinned where a GPU reads it, within a budget, and lent to the next cache when one dies."""

from __future__ import annotations

import math
import mmap
import sys
import threading
import warnings
import weakref
from collections import deque

import psutil
import torch
from torch import Tensor

from .cgroup import remaining_memory

# cudaHostRegisterPortable | cudaHostRegisterMapped
REGISTER_FLAGS = 3
# Private: Linux makes no huge pages of shared memory unless shmem_enabled is set, which by default it is not.
MAP_FLAGS = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MADV_HUGEPAGE") else {}


class PinnedMap(mmap.mmap):
    """Anonymous memory that is registered with CUDA until it is freed, at `address`; `device` reads and writes it."""

    address: int | None = None
    device: torch.device

    def __del__(self) -> None:
        if self.address is not None and not sys.is_finalizing():
            with torch.cuda.device(self.device):
                torch.cuda.synchronize()  # no kernel may still read it
                torch.cuda.cudart().cudaHostUnregister(self.address)


class Pool:
    """Pinned maps, lent to tensors: one whose tensor has died is idle, and the next tensor of its size gets it.

    Registration costs about a second for a few gigabytes, in every prefill without this. Idle and lent maps together
    are never more than were once lent at the same time (`peak`), and idle ones never more than half of what else is
    free when a new map is made. A tensor may die anywhere, so that its map is only noted as `returned` there; locks
    and CUDA calls are for those who ask for memory.
    """

    def __init__(self) -> None:
        self.idle: list[PinnedMap] = []
        self.returned: deque[PinnedMap] = deque()
        self.lent = self.peak = 0
        self.lock = threading.Lock()

    def idle_bytes(self) -> int:
        """Bytes that no tensor uses."""
        with self.lock:
            return self.collect()

    def release(self) -> None:
        """Free what is idle, and forget how much was ever lent."""
        with self.lock:
            self.collect()
            self.idle.clear()
            self.peak = self.lent

    def collect(self) -> int:
        """Take in the maps of the tensors that have died; returns the idle bytes then."""
        while self.returned:
            self.idle.append(self.returned.popleft())
            self.lent -= len(self.idle[-1])
        return sum(map(len, self.idle))

    def lend(self, size: int, device: torch.device) -> memoryview | None:
        """`size` bytes or a little more, with whatever they held last; None where they cannot be pinned."""
        with self.lock:
            self.collect()
            memory = self.reuse(size, device) or self.make(size, device)
            if memory is None:
                return None
            self.lent += len(memory)
            self.peak = max(self.peak, self.lent)
        lease = memoryview(memory)
        weakref.finalize(lease, self.returned.append, memory).atexit = False
        return lease

    def reuse(self, size: int, device: torch.device) -> PinnedMap | None:
        """The smallest idle map that holds `size` bytes with at most an eighth to spare, as buckets have it."""
        fitting = [memory for memory in self.idle if size <= len(memory) <= size + size // 8]
        if not fitting:
            return None
        memory = min(fitting, key=len)
        self.idle.remove(memory)
        torch.cuda.synchronize(memory.device)  # copies of the tensor that died may still be under way
        memory.device = device
        return memory

    def make(self, size: int, device: torch.device) -> PinnedMap | None:
        """A new map, for which idle ones make room: by the pool's own measure, and where the driver has no more."""
        while idle := self.collect():
            if self.lent + size + idle <= self.peak and idle <= (free_memory() - size) // 2:
                break
            del self.idle[0]
        memory = pinned_map(size, device)
        if memory is None and self.idle:
            self.idle.clear()
            memory = pinned_map(size, device)
        return memory


_pool = Pool()


def release_host_memory() -> None:
    """Give back the pinned memory that no cache uses any more, and that is kept for caches to come."""
    _pool.release()


def host_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor on the host that `device` can read, with anything in it: nothing is read of a host tier that was not
    written before. Pinned for a GPU; where that fails, ordinary memory and one warning."""
    size = math.prod(shape) * dtype.itemsize
    lease = _pool.lend(size, device) if device.type == "cuda" and size else None
    if lease is not None:
        return torch.frombuffer(lease, dtype=torch.uint8, count=size).view(dtype).view(shape)
    if device.type == "cuda" and size:
        warnings.warn(
            f"could not pin {size / 2**30:.2f} GiB of host memory: the host tier is pageable, and every fetch stops "
            "the step. Raise the limit on locked memory (ulimit -l), or lower the batch or the context",
            stacklevel=2,
        )
    return torch.empty(shape, dtype=dtype)


def pinned_map(size: int, device: torch.device) -> PinnedMap | None:
    """New memory, registered with CUDA; None where that fails."""
    memory = PinnedMap(-1, size, **MAP_FLAGS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
        # A child process would share the pages until a write: that write's copy would not be what the GPU has pinned.
        memory.madvise(mmap.MADV_DONTFORK)
    memory.device = device
    start = torch.frombuffer(memory, dtype=torch.uint8)
    if register(start.data_ptr(), size, device):
        memory.address = start.data_ptr()
    return memory if start.is_pinned() else None


def register(address: int, size: int, device: torch.device) -> bool:
    """Pin the range, in one piece; False where the driver refuses.

    A copy must not cross from one registration into the next: nothing says that one may. A layer's tier is one map, and
    so one registration. Every device can read it then; CUDA starts up on the current one, so that must be `device`.
    """
    with torch.cuda.device(device):
        refused = int(torch.cuda.cudart().cudaHostRegister(address, size, REGISTER_FLAGS)) != 0
        if refused:
            clear_error()
    return not refused


def clear_error() -> None:
    """CUDA reports a refused registration once more, at the next launch; take that report here."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        warnings.warn(f"CUDA refused to pin memory: {error}", stacklevel=2)


def allowance(held: int, asked: int | None, ranks: int = 1) -> int:
    """Bytes that a host tier, of which `held` are there, may have: what was `asked`, or half of what is free,
    which the pool's idle maps are: they make room. So many `ranks` of one model share either."""
    return (free_memory() // ranks + _pool.idle_bytes() + held) // 2 if asked is None else asked // ranks


def free_memory() -> int:
    """Bytes that may still be had: of the machine, and of the container that this process is in."""
    free, left = int(psutil.virtual_memory().available), remaining_memory()
    return free if left is None else min(free, left)
