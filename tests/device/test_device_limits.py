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
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.errors import OutOfResources

from specache_compile.bench.results import provenance

pytestmark = pytest.mark.gpu
simulated_only = pytest.mark.skipif("SIMULATED_DEVICE" not in os.environ, reason="a real device may not notice")

INVALID_VALUE, NO_BINARY = 1, 209  # CUresult


@triton.jit
def double(source, out, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(source + place, mask=place < size) * 2, mask=place < size)


@triton.jit
def multiply(a, b, out, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    place = row * SIZE + column
    tl.store(out + place, tl.dot(tl.load(a + place), tl.load(b + place)))


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


def test_an_image_for_another_architecture_is_refused() -> None:
    other = 90 if torch.cuda.get_device_capability()[0] == 8 else 80
    signature = {"source": "*fp32", "out": "*fp32", "size": "i32", "BLOCK": "constexpr"}
    source = ASTSource(double, signature=signature, constexprs={"BLOCK": 64})
    image = triton.compile(source, target=GPUTarget("cuda", other, 32)).asm["cubin"]
    module = ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuModuleLoadData(ctypes.byref(module), image) == NO_BINARY


def test_a_kernel_with_more_shared_memory_than_a_block_may_have_is_refused() -> None:
    """128 KiB: two tiles of 128 x 128 numbers. An RTX 4090 has 99 KiB for a block, an A100 163, an H100 227."""
    a = torch.randn(128, 128, device="cuda")
    out = torch.empty_like(a)
    most = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    if most < 128 << 10:
        with pytest.raises(OutOfResources, match="shared memory"):
            multiply[(1,)](a, a, out, SIZE=128)
    else:
        multiply[(1,)](a, a, out, SIZE=128)
        torch.testing.assert_close(out, a @ a, atol=1e-1, rtol=1e-2)  # the device multiplies in TF32


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
