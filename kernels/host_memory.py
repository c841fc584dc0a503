"""Memory of the host tier: pinned where a GPU reads it, within a budget, and given back when its cache dies."""

from __future__ import annotations

import math
import mmap
import sys
import warnings

import psutil
import torch
from torch import Tensor

from .cgroup import remaining_memory

# Registered piece by piece: one call for many gigabytes holds the driver's lock for seconds.
BLOCK = 1 << 30
# cudaHostRegisterPortable | cudaHostRegisterMapped
REGISTER_FLAGS = 3
# Private: Linux makes no huge pages of shared memory unless shmem_enabled is set, which by default it is not.
MAP_FLAGS = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MADV_HUGEPAGE") else {}


class PinnedMap(mmap.mmap):
    """Anonymous memory that is registered with CUDA until it is freed; `device` reads and writes it."""

    blocks: tuple[tuple[int, int], ...] = ()
    device: torch.device

    def __del__(self) -> None:
        if self.blocks and not sys.is_finalizing():
            with torch.cuda.device(self.device):
                torch.cuda.synchronize()  # no kernel may still read it
                unregister(self.blocks)


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on the host, readable by `device`: pinned for a GPU; where that fails, ordinary memory and one warning."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cuda" or size == 0:
        return torch.zeros(shape, dtype=dtype)
    memory = PinnedMap(-1, size, **MAP_FLAGS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
        # A child process would share the pages until a write: that write's copy would not be what the GPU has pinned.
        memory.madvise(mmap.MADV_DONTFORK)
    tensor = torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
    memory.device = device
    memory.blocks = register(tensor.data_ptr(), size, device)
    if not tensor.is_pinned():
        warnings.warn(
            f"could not pin {size / 2**30:.2f} GiB of host memory: the host tier is pageable, and every fetch stops "
            "the step. Raise the limit on locked memory (ulimit -l), or lower the batch or the context",
            stacklevel=2,
        )
    return tensor


def register(address: int, size: int, device: torch.device) -> tuple[tuple[int, int], ...]:
    """Pin the range block by block; all of it or, where the driver refuses a block, nothing.

    Every device can read it then; CUDA starts up on the current one, so that must be `device`.
    """
    blocks: list[tuple[int, int]] = []
    with torch.cuda.device(device):
        for start in range(address, address + size, BLOCK):
            length = min(BLOCK, address + size - start)
            if int(torch.cuda.cudart().cudaHostRegister(start, length, REGISTER_FLAGS)) != 0:
                unregister(tuple(blocks))
                clear_error()
                return ()
            blocks.append((start, length))
    return tuple(blocks)


def unregister(blocks: tuple[tuple[int, int], ...]) -> None:
    for start, _ in blocks:
        torch.cuda.cudart().cudaHostUnregister(start)


def clear_error() -> None:
    """CUDA reports a refused registration once more, at the next launch; take that report here."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        warnings.warn(f"CUDA refused to pin memory: {error}", stacklevel=2)


def budget(held: int, asked: int | None) -> int:
    """Bytes that a host tier, of which `held` are there, may have: what was `asked`, or half of what is free."""
    return (free_memory() + held) // 2 if asked is None else asked


def free_memory() -> int:
    """Bytes that may still be had: of the machine, and of the container that this process is in."""
    free, left = int(psutil.virtual_memory().available), remaining_memory()
    return free if left is None else min(free, left)
