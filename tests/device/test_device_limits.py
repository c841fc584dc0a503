"""Launches that a device refuses, real or simulated; and errors that only the simulated device always detects."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux alone")

import triton
import triton.language as tl

from specache_compile.bench.results import provenance

pytestmark = pytest.mark.gpu
simulated_only = pytest.mark.skipif("SIMULATED_DEVICE" not in os.environ, reason="a real device may not notice")

INVALID_VALUE = 1  # CUresult


@triton.jit
def double(source, out, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(source + place, mask=place < size) * 2, mask=place < size)


def launched(numbers: int = 100) -> Any:
    """Return the compiled kernel, after a launch."""
    source = torch.arange(numbers, dtype=torch.float32, device="cuda")
    out = torch.empty_like(source)
    kernel = double[(triton.cdiv(numbers, 64),)](source, out, numbers, BLOCK=64)
    assert torch.equal(out, source * 2)
    return kernel


# Each of these launches of a kernel of 128 threads exceeds a limit of such devices.
@pytest.mark.parametrize(
    ("grid", "threads", "shared"),
    [((1, 70_000, 1), 128, 0), ((1, 1, 0), 128, 0), ((1, 1, 1), 2048, 0), ((1, 1, 1), 128, 300_000)],
    ids=["65,536 blocks in y", "no blocks", "2,048 threads", "300 KB of shared memory"],
)
def test_a_launch_beyond_a_limit_is_refused(grid: tuple[int, int, int], threads: int, shared: int) -> None:
    kernel = launched()
    driver = ctypes.CDLL("libcuda.so.1")
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    function = ctypes.c_void_p(kernel.function)
    assert driver.cuLaunchKernel(function, *grid, threads, 1, 1, shared, stream, None, None) == INVALID_VALUE


def test_memory_ends_where_the_devices_does() -> None:
    free, total = torch.cuda.mem_get_info()
    assert 0 < free < total
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total, dtype=torch.uint8, device="cuda")


@simulated_only
def test_results_state_that_the_device_is_simulated() -> None:
    assert provenance(torch.device("cuda"), "a benchmark")["device"].endswith("(simulated)")


@simulated_only
def test_unwritten_memory_is_not_a_number() -> None:
    torch.cuda.empty_cache()
    assert torch.empty(30 << 20, dtype=torch.float32, device="cuda")[:1000].isnan().all()


class Address:
    """Replaces a tensor in a launch."""

    dtype = torch.float32

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def test_a_kernel_reads_memory_of_the_host_only_if_it_is_pinned() -> None:
    host, out = torch.ones(64), torch.empty(64, device="cuda")
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        double[(1,)](Address(host.data_ptr()), out, 64, BLOCK=64)
    pinned = torch.ones(64, pin_memory=True)
    double[(1,)](Address(pinned.data_ptr()), out, 64, BLOCK=64)
    assert torch.equal(out.cpu(), host * 2)


@simulated_only
def test_a_kernel_that_reads_past_an_allocation_is_reported() -> None:
    torch.cuda.empty_cache()
    alone, out = torch.zeros(30 << 20, device="cuda"), torch.empty(64, device="cuda")  # 120 MiB, a segment of their own
    with pytest.raises(RuntimeError, match="a read of 4 bytes"):
        double[(1,)](Address(alone.data_ptr() + (120 << 20) - 128), out, 64, BLOCK=64)
