"""Memory of the host tier: pinned where a GPU reads it, within a budget, and lent to the next cache when one dies.

A pinned tier has more addresses than memory: those of its bucket, and more behind them. Addresses cost nothing until
they are touched: the segments that new tokens need are pinned when they come, and what is there stays where it is. A
cache that grows has its next segments pinned on a thread before they are needed.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import psutil
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from specache_compile.errors import warn

from .cgroup import remaining_memory

T = TypeVar("T")

# cudaHostRegisterPortable | cudaHostRegisterMapped
REGISTER_FLAGS = 3
# Private: Linux makes no huge pages of shared memory unless shmem_enabled is set, which by default it is not. Without
# MAP_NORESERVE (0x4000, which mmap does not name) it refuses more addresses than there is memory.
MAP_FLAGS = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000} if hasattr(mmap, "MADV_HUGEPAGE") else {}
# Linux's advice to make pages as if they were written to; since 5.14.
POPULATE_WRITE = 23
# Addresses of a tier, in its first bucket's: it moves when it outgrows them.
ROOM = 8 if MAP_FLAGS else 1


class PinnedMap(mmap.mmap):
    """Anonymous memory, of which `device` reads and writes what is registered with CUDA.

    pinned: the first so many bytes are registered, until the memory is freed.
    registered: where each registration begins.
    unit: bytes of a segment. No registration ends within one: a copy must not cross from one registration into the
        next, for nothing says that one may.
    asked_ahead, ahead: how many bytes a thread is to have pinned in all, and has; 0: it could not.
    """

    pinned: int
    registered: list[int]
    device: torch.device
    unit: int = 1
    asked_ahead: int = 0
    ahead: Future[int] | None = None

    def __del__(self) -> None:
        if getattr(self, "registered", None) and not sys.is_finalizing():
            with torch.cuda.device(self.device):
                torch.cuda.synchronize()  # no kernel may still read it
                for address in self.registered:
                    torch.cuda.cudart().cudaHostUnregister(address)

    def pin(self, size: int) -> bool:
        """Register what lies between `pinned` and `size`; False where the driver refuses."""
        if not self.register_to(size):
            return False
        self.pinned = size
        return True

    def register_to(self, size: int) -> bool:
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr() + self.pinned
        if not register(address, size - self.pinned, self.device):
            return False
        self.registered.append(address)
        return True

    def pin_ahead(self, size: int) -> int:
        """On a thread: make the pages up to `size`, and register them; returns the size, or 0. Nothing here holds up
        Python's other threads."""
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr() + self.pinned
        begin = address // mmap.PAGESIZE * mmap.PAGESIZE
        end = address + size - self.pinned
        if hasattr(mmap, "MADV_HUGEPAGE"):  # where it fails, on an older Linux or for want of memory, registering tells
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), POPULATE_WRITE)
        return size if self.register_to(size) else 0


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
        self.leases: weakref.WeakValueDictionary[int, memoryview] = weakref.WeakValueDictionary()  # by address
        self.lent = self.peak = 0
        self.ahead = 0  # bytes that a thread pins, or has pinned, and nobody has yet
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
            memory = self.returned.popleft()
            self.lent -= memory.pinned
            self.take_ahead(memory)
            self.idle.append(memory)
        return sum(memory.pinned for memory in self.idle)

    def lend(self, size: int, addresses: int, unit: int, device: torch.device) -> memoryview | None:
        """A map with so many `addresses`, or more; None where its first bytes cannot be pinned.

        The first `size` bytes, or a little more, are pinned, and hold what they held last. unit: bytes of a segment.
        """
        size = min(whole_pages(size, unit), addresses * ROOM)
        with self.lock:
            self.collect()
            memory = self.reuse(size, addresses, unit, device) or self.make(size, addresses, device)
            if memory is None:
                return None
            memory.unit = unit
            self.note_lent(memory.pinned)
            lease = memoryview(memory)
            self.leases[torch.frombuffer(memory, dtype=torch.uint8).data_ptr()] = lease
        weakref.finalize(lease, self.returned.append, memory).atexit = False
        return lease

    def note_lent(self, size: int) -> None:
        self.lent += size
        self.peak = max(self.peak, self.lent)

    def lent_at(self, address: int) -> bool:
        """Whether a map of this pool begins there, that a tensor has."""
        with self.lock:
            return address in self.leases

    def map_at(self, address: int) -> PinnedMap | None:
        """The map that a tensor has there."""
        lease = self.leases.get(address)
        memory = None if lease is None else lease.obj
        return memory if isinstance(memory, PinnedMap) else None

    def grow(self, address: int, size: int, addresses: int) -> memoryview | None:
        """The lease of the map at this address, now with `size` pinned bytes of so many `addresses`; None where there
        is none, or it has fewer, or they cannot be pinned."""
        with self.lock:
            lease, memory = self.leases.get(address), self.map_at(address)
            if memory is None or addresses > len(memory):
                return None
            self.note_lent(self.take_ahead(memory))
            before, size = memory.pinned, min(whole_pages(size, memory.unit), len(memory))
            if size > before:
                self.make_room(size - before)
                if before % math.lcm(memory.unit, mmap.PAGESIZE) or not self.insist(lambda: memory.pin(size)):
                    return None
                self.note_lent(size - before)
            return lease

    def grow_ahead(self, address: int, size: int) -> None:
        """Begin to pin the map at this address up to `size` bytes on a thread; `grow` waits for the end of it."""
        with self.lock:
            memory = self.map_at(address)
            if memory is None or memory.ahead is not None:
                return
            size = whole_pages(size, memory.unit)
            if not memory.pinned < size <= len(memory):
                return
            if memory.pinned % math.lcm(memory.unit, mmap.PAGESIZE) == 0:
                self.make_room(size - memory.pinned)
                self.ahead += size - memory.pinned
                memory.asked_ahead, memory.ahead = size, _pinning.submit(memory.pin_ahead, size)

    def take_ahead(self, memory: PinnedMap) -> int:
        """What a thread has pinned of a map is the map's from here on; returns its bytes."""
        if memory.ahead is None:
            return 0
        before, size = memory.pinned, memory.ahead.result()
        self.ahead -= memory.asked_ahead - before
        memory.pinned, memory.ahead = size or before, None
        return memory.pinned - before

    def reuse(self, size: int, addresses: int, unit: int, device: torch.device) -> PinnedMap | None:
        """The smallest idle map with these addresses that holds `size` bytes with at most an eighth to spare."""
        fitting = [
            memory
            for memory in self.idle
            if size <= memory.pinned <= size + size // 8
            and addresses <= len(memory)
            and (len(memory.registered) == 1 or memory.unit == unit)
        ]
        if not fitting:
            return None
        memory = min(fitting, key=lambda memory: memory.pinned)
        self.idle.remove(memory)
        torch.cuda.synchronize(memory.device)  # copies of the tensor that died may still be under way
        memory.device = device
        return memory

    def make(self, size: int, addresses: int, device: torch.device) -> PinnedMap | None:
        """A new map; None where it cannot be pinned."""
        self.make_room(size)
        return self.insist(lambda: pinned_map(size, addresses, device))

    def make_room(self, size: int) -> None:
        """Free idle maps until so many new bytes keep the pool's own measure."""
        while idle := self.collect():
            if self.lent + self.ahead + size + idle <= self.peak and idle <= (free_memory() - size) // 2:
                break
            del self.idle[0]

    def insist(self, pin: Callable[[], T | None]) -> T | None:
        """What `pin` gives; where the driver pins no more, once again without any idle map."""
        pinned = pin()
        if not pinned and self.idle:
            self.idle.clear()
            pinned = pin()
        return pinned


_pool = Pool()
_pinning = ThreadPoolExecutor(1, "specache-pinning")


def release_host_memory() -> None:
    """Free the pinned host memory that no cache uses and that is kept for later caches.

    Example:
        import specache_compile as sc

        sc.release_host_memory()  # after the last cache is gone, before another program needs the memory
    """
    _pool.release()


def makes_fakes() -> bool:
    """Whether tensors that are made here and now are fakes."""
    return isinstance(torch.empty(0, device="cpu"), FakeTensor)


def host_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, backed: int | None = None) -> Tensor:
    """A tensor on the host, of which `device` can read the first `backed` places of dim 0 (all, if not given).

    The tensor holds anything: nothing is read of a host tier that was not written before. For a GPU its memory is
    pinned; where that fails, the memory is ordinary, and one warning says so. Under a fake mode there is no memory to
    pin.
    """
    if makes_fakes():
        return torch.empty(shape, dtype=dtype, device="cpu")
    addresses, unit = math.prod(shape) * dtype.itemsize, math.prod(shape[1:]) * dtype.itemsize
    size = addresses if backed is None else backed * unit
    lease = _pool.lend(size, addresses, unit, device) if device.type == "cuda" and size else None
    if lease is not None:
        return viewed(lease, shape, dtype)
    if device.type == "cuda" and size:
        warn(
            f"could not pin {size / 2**30:.2f} GiB of host memory: the host tier is pageable, and every fetch stops "
            "the step. Raise the limit on locked memory (ulimit -l), or lower the batch or the context",
            UserWarning,
        )
    return torch.empty(shape, dtype=dtype, device="cpu")


def whole_pages(size: int, unit: int) -> int:
    """The size, or a little more, so that the next registration can begin there.

    More where segments of `unit` bytes are no whole pages: segments of 8 bits, of an odd number of heads.
    """
    step = math.lcm(unit, mmap.PAGESIZE) if unit > mmap.PAGESIZE else 1
    return -(-size // step) * step


def host_grown(old: Tensor, shape: tuple[int, ...], device: torch.device, backed: int | None = None) -> Tensor | None:
    """`old` where it is, with the places along dim 0 of `shape`; None where `old` must move for that.

    `device` can read the first `backed` places (all, if not given). Ordinary memory that has that shape already stays:
    all of such memory can be read.
    """
    unit = math.prod(shape[1:]) * old.dtype.itemsize
    if device.type != "cuda" or isinstance(old, FakeTensor) or not _pool.lent_at(old.data_ptr()):
        return old if old.shape == shape else None
    lease = _pool.grow(old.data_ptr(), unit * (shape[0] if backed is None else backed), unit * shape[0])
    if lease is None:
        return None
    return old if old.shape == shape else viewed(lease, shape, old.dtype)


def grow_ahead(tensor: Tensor, backed: int) -> None:
    """Let a thread pin memory for the first `backed` places of dim 0 of a tier that `host_empty` made, for `host_grown`
    to find. Ordinary memory is there already."""
    if tensor.is_pinned():
        _pool.grow_ahead(tensor.data_ptr(), tensor[0].nbytes * backed)


def viewed(lease: memoryview, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The map's first addresses as a tensor, which keeps the lease."""
    count = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(lease, dtype=torch.uint8, count=count).view(dtype).view(shape)


def pinned_map(size: int, addresses: int, device: torch.device) -> PinnedMap | None:
    """So many `addresses` and more, the first `size` bytes of them registered with CUDA; None where that fails."""
    try:
        memory = PinnedMap(-1, addresses * ROOM, **MAP_FLAGS)
    except OSError:  # so many addresses are not to be had
        memory = PinnedMap(-1, addresses, **MAP_FLAGS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
        # A child process would share the pages until a write: that write's copy would not be what the GPU has pinned.
        memory.madvise(mmap.MADV_DONTFORK)
    memory.device, memory.pinned, memory.registered = device, 0, []
    memory.pin(size)
    return memory if torch.frombuffer(memory, dtype=torch.uint8).is_pinned() else None


def register(address: int, size: int, device: torch.device) -> bool:
    """Pin the range; False where the driver refuses, or has another address for it on the device: kernels are given the
    host's. Every device can read it then; CUDA starts up on the current one, so that must be `device`."""
    with torch.cuda.device(device):
        if int(torch.cuda.cudart().cudaHostRegister(address, size, REGISTER_FLAGS)) != 0:
            clear_error()
            return False
        if address_on_device(address) == address:
            return True
        torch.cuda.cudart().cudaHostUnregister(address)
    warn(f"{device} has another address for pinned memory than the host: it is left unpinned", UserWarning)
    return False


def address_on_device(address: int) -> int | None:
    """Where the current device has registered memory that the host has at `address`; None where nobody says.

    The driver, which torch has loaded, is asked: torch's bindings of the runtime lack that question.
    """
    driver, found = ctypes.CDLL("nvcuda" if sys.platform == "win32" else "libcuda.so.1"), ctypes.c_uint64()
    error = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(found), ctypes.c_void_p(address), 0)
    return None if error else found.value


def clear_error() -> None:
    """CUDA reports a refused registration once more, at the next launch; take that report here."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        warn(f"CUDA refused to pin memory: {error}", UserWarning)


def allowance(held: int, asked: int | None, ranks: int = 1) -> int:
    """Bytes that a host tier may have, of which `held` are there: what was `asked`, or half of what is free.

    The pool's idle maps count as free, since they make room. So many `ranks` of one model share either.
    """
    own = _pool.idle_bytes() + _pool.ahead
    return (free_memory() // ranks + own + held) // 2 if asked is None else asked // ranks


def free_memory() -> int:
    """Bytes that may still be had: of the machine, and of the container that this process is in."""
    free, left = int(psutil.virtual_memory().available), remaining_memory()
    return free if left is None else min(free, left)
