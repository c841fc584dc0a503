"""Memory of the host tier: pinned for GPUs, within a budget, and reused by the next cache.

A pinned tier reserves more addresses than memory, so that it grows in place. Addresses cost nothing until they are
touched: new pages are pinned when new tokens need them.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
import threading
import weakref
from pathlib import Path

import psutil
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from specache_compile.errors import SpecacheError

# cudaHostRegisterPortable | cudaHostRegisterMapped
REGISTER_FLAGS = 3
# Without MAP_NORESERVE, which mmap does not define, Linux refuses to map more addresses than there is memory.
NO_RESERVE = 0x4000
# Reserved addresses of a tier, in units of its first bucket; a tier that outgrows them moves.
ROOM = 8
# Control groups (version 2), and the file with those of this process.
GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class PinnedMap(mmap.mmap):
    """Anonymous memory; `device` can access the part that is registered with CUDA.

    pinned: number of registered bytes, from the start, until the memory is freed.
    registered: start address of each registration.
    unit: bytes of a page of tokens. No registration ends within one, since CUDA does not specify copies across two.
    """

    pinned: int
    registered: list[int]
    device: torch.device
    unit: int = 1

    def __del__(self) -> None:
        if getattr(self, "registered", None) and not sys.is_finalizing():
            with torch.cuda.device(self.device):
                torch.cuda.synchronize()  # kernels may still read it
                for address in self.registered:
                    torch.cuda.cudart().cudaHostUnregister(address)

    def pin(self, size: int) -> bool:
        """Register the bytes from `pinned` to `size`; returns False if the driver refuses."""
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr() + self.pinned
        if not register(address, size - self.pinned, self.device):
            return False
        self.registered.append(address)
        self.pinned = size
        return True


class Pool:
    """Pinned maps, lent to tensors. A map whose tensor was freed is idle: the next tensor of its size reuses it.

    The pool avoids registering memory in every prefill, about a second for a few gigabytes. A new map, or the growth of
    one, frees all idle ones. Freeing a tensor, which can happen on any thread, only appends its map to `idle`. Requests
    for memory take locks and call CUDA.
    """

    def __init__(self) -> None:
        self.idle: list[PinnedMap] = []
        self.leases: weakref.WeakValueDictionary[int, memoryview] = weakref.WeakValueDictionary()  # by address
        self.lock = threading.Lock()

    def idle_bytes(self) -> int:
        """Return the bytes that no tensor uses."""
        return sum(memory.pinned for memory in list(self.idle))

    def lend(self, size: int, addresses: int, unit: int, device: torch.device) -> memoryview | None:
        """Lend a map with at least `addresses` bytes of addresses; None if its first bytes cannot be pinned.

        At least the first `size` bytes are pinned, with their previous content. unit: as in `PinnedMap`.
        """
        size = min(whole_pages(size, unit), addresses * ROOM)
        with self.lock:
            memory = self.reuse(size, addresses, unit, device)
            if memory is None:
                self.idle.clear()
                memory = pinned_map(size, addresses, device)
            if memory is None:
                return None
            memory.unit = unit
            lease = memoryview(memory)
            self.leases[torch.frombuffer(memory, dtype=torch.uint8).data_ptr()] = lease
        weakref.finalize(lease, self.idle.append, memory).atexit = False
        return lease

    def grow(self, memory: PinnedMap, size: int, addresses: int) -> bool:
        """Pin a lent map up to `size` bytes.

        Returns False if it has fewer than `addresses` bytes of addresses, or if pinning fails.
        """
        with self.lock:
            size = min(whole_pages(size, memory.unit), len(memory))
            if addresses > len(memory):
                return False
            if size <= memory.pinned:
                return True
            if memory.pinned % math.lcm(memory.unit, mmap.PAGESIZE):
                return False
            self.idle.clear()  # `allowance` counts these maps as free
            return memory.pin(size)

    def reuse(self, size: int, addresses: int, unit: int, device: torch.device) -> PinnedMap | None:
        """Return the smallest idle map with these addresses that holds `size` bytes and wastes at most an eighth."""
        fitting = [
            memory
            for memory in list(self.idle)
            if size <= memory.pinned <= size + size // 8
            and addresses <= len(memory)
            and (len(memory.registered) == 1 or memory.unit == unit)
        ]
        if not fitting:
            return None
        memory = min(fitting, key=lambda memory: memory.pinned)
        self.idle.remove(memory)
        torch.cuda.synchronize(memory.device)  # copies of the freed tensor may still run
        memory.device = device
        return memory


_pool = Pool()


def release_host_memory() -> None:
    """Free the pinned host memory that no cache uses and that is kept for later caches.

    Example:
        import specache_compile as sc

        sc.release_host_memory()  # after the last cache is gone, before another program needs the memory
    """
    with _pool.lock:
        _pool.idle.clear()


def makes_fakes() -> bool:
    """Return whether new tensors are fakes in the current mode."""
    return isinstance(torch.empty(0, device="cpu"), FakeTensor)


def host_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, backed: int | None = None) -> Tensor:
    """Allocate an uninitialised host tensor, whose first `backed` entries of dim 0 (default: all) `device` can read.

    For a GPU the memory is pinned; SpecacheError if that fails. Under a fake mode nothing is pinned.
    """
    addresses, unit = math.prod(shape) * dtype.itemsize, math.prod(shape[1:]) * dtype.itemsize
    size = addresses if backed is None else backed * unit
    if device.type != "cuda" or not size or makes_fakes():
        return torch.empty(shape, dtype=dtype, device="cpu")
    lease = _pool.lend(size, addresses, unit, device)
    if lease is None:
        raise SpecacheError(
            f"CUDA refused to pin {size} bytes of host memory for the host tier. Raise the limit on locked memory "
            "(ulimit -l unlimited), lower host_memory, the batch or the context, or set host_tier=False"
        )
    return viewed(lease, shape, dtype)


def whole_pages(size: int, unit: int) -> int:
    """Round the size up, so that the next registration can begin there.

    `unit` may not be whole pages of the system, with 8-bit pairs of an odd number of heads.
    """
    step = math.lcm(unit, mmap.PAGESIZE) if unit > mmap.PAGESIZE else 1
    return -(-size // step) * step


def host_grown(old: Tensor, shape: tuple[int, ...], device: torch.device, backed: int | None = None) -> Tensor | None:
    """Grow `old` in place to `shape` along dim 0; None if `old` must move.

    `device` can read the first `backed` entries (default: all). Pageable memory that has this shape already is
    returned unchanged.
    """
    unit = math.prod(shape[1:]) * old.dtype.itemsize
    lease = None if device.type != "cuda" or isinstance(old, FakeTensor) else _pool.leases.get(old.data_ptr())
    if lease is None:
        return old if old.shape == shape else None
    memory, backed = lease.obj, shape[0] if backed is None else backed
    assert isinstance(memory, PinnedMap)
    if not _pool.grow(memory, backed * unit, shape[0] * unit):
        return None
    return old if old.shape == shape else viewed(lease, shape, old.dtype)


def viewed(lease: memoryview, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the map's first addresses as a tensor, which keeps the lease alive."""
    count = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(lease, dtype=torch.uint8, count=count).view(dtype).view(shape)


def pinned_map(size: int, addresses: int, device: torch.device) -> PinnedMap | None:
    """Map at least `addresses` bytes, with the first `size` bytes registered with CUDA; None if that fails."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE  # private: shared memory gets no huge pages by default
    try:
        memory = PinnedMap(-1, addresses * ROOM, flags=flags)
    except OSError:  # too many addresses
        memory = PinnedMap(-1, addresses, flags=flags)
    memory.madvise(mmap.MADV_HUGEPAGE)
    # A child process would share the pages until a write, which copies them: the GPU has pinned the old pages.
    memory.madvise(mmap.MADV_DONTFORK)
    memory.device, memory.pinned, memory.registered = device, 0, []
    return memory if memory.pin(size) else None


def register(address: int, size: int, device: torch.device) -> bool:
    """Pin the range for every device; returns False if the driver refuses."""
    with torch.cuda.device(device):
        if int(torch.cuda.cudart().cudaHostRegister(address, size, REGISTER_FLAGS)) == 0:
            return True
        with contextlib.suppress(RuntimeError):  # clear CUDA's error, which the next launch would report
            torch.zeros(1, device="cuda")
        return False


def allowance(held: int, requested: int | None, ranks: int = 1) -> int:
    """Return the bytes that a host tier may have: the `requested` bytes, or half of the free memory plus `held` bytes.

    Idle maps count as free, since the pool frees them on demand. `ranks` processes of one model share the limit.
    """
    return (free_memory() // ranks + _pool.idle_bytes() + held) // 2 if requested is None else requested // ranks


def free_memory() -> int:
    """Return the bytes of memory that the machine and this process's container have free."""
    free, left = int(psutil.virtual_memory().available), remaining_memory()
    return free if left is None else min(free, left)


def remaining_memory() -> int | None:
    """Return the bytes that this process may still allocate under the limits of all its control groups; None without a
    limit. A container's limit is often far below the free memory of the machine."""
    lines = MEMBERSHIP.read_text().splitlines() if MEMBERSHIP.exists() else []
    own = next((Path(line.removeprefix("0::/")) for line in lines if line.startswith("0::/")), Path())
    left = [bytes_left(GROUPS / group) for group in (own, *own.parents)]
    return min((size for size in left if size is not None), default=None)


def bytes_left(folder: Path) -> int | None:
    """Return the limit of one group minus its usage, of which file pages can be dropped; None without a limit."""
    try:
        limit, usage, stat = ((folder / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
    except OSError:  # no such group, or no memory controller
        return None
    if limit.strip() == "max":
        return None
    statistics = dict(line.split() for line in stat.splitlines())
    return max(0, int(limit) - int(usage) + int(statistics["inactive_file"]))
