"""Check the kernels' assumptions about a GPU and its driver, in a minute.

    python benchmarks/gpu_probe.py    (--smoke: small shapes; without a GPU, probes that need one are left out)

Each probe runs in a new process, because an illegal memory access ends the process. Exit status 1: an assumption does
not hold.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from measuring import limits, milliseconds, parsed, parser_of
from tabulate import tabulate
from torch import Tensor

from specache_compile.bench.results import Results
from specache_compile.kernels.memory import host_memory
from specache_compile.kernels.movement import triton_copy
from specache_compile.kernels.state.by_token import tokens_of
from specache_compile.kernels.state.page_table import PAGE, Pages
from specache_compile.kernels.state.stored_pairs import ROUNDED, rounded_width

CUDA = torch.device("cuda")
# CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
SAME_ADDRESS = 91
GIB = 1 << 30
Found = dict[str, Any]


@triton.jit
def one_dot(codes, weights, out):
    """out [16, 16] float32 = codes [16, 16] int16, their bits taken as bfloat16, times weights [16, 16] bfloat16."""
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    left = tl.load(codes + row * 16 + column).to(tl.bfloat16, bitcast=True)
    tl.store(out + row * 16 + column, tl.dot(left, tl.load(weights + row * 16 + column)))


def subnormal_products() -> Found:
    """Whether a tensor core multiplies subnormal bfloat16 numbers as they are: codes 0 to 255, times powers of two."""
    codes = torch.arange(256, dtype=torch.int16, device=CUDA).view(16, 16)
    weights = torch.eye(16, dtype=torch.bfloat16, device=CUDA) * 2.0**48
    out = torch.empty(16, 16, device=CUDA)
    one_dot[(1,)](codes, weights, out, num_warps=1)
    right = torch.equal(out * 2.0**85, codes.float())
    return {"holds": right, "says": "exact" if right else f"code 255 became {float(out[-1, -1]) * 2.0**85}"}


def same_address() -> Found:
    """Whether the GPU reads registered memory at the address that the host has for it."""
    driver, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    error = driver.cuDeviceGetAttribute(ctypes.byref(value), SAME_ADDRESS, torch.cuda.current_device())
    return {"holds": error == 0 and value.value == 1, "says": f"attribute {value.value}, error {error}"}


def registration() -> Found:
    """Whether 4 GiB can be registered in one call, which a layer of a large batch is, copied across and read."""
    start = time.perf_counter()
    tensor = host_memory.host_empty((4 * GIB,), torch.uint8, CUDA)
    seconds = time.perf_counter() - start
    middle = tensor[2 * GIB - 4096 : 2 * GIB + 4096]
    middle.copy_(torch.arange(8192, device=CUDA).to(torch.uint8), non_blocking=True)
    torch.cuda.synchronize()
    right = torch.equal(middle, torch.arange(8192).to(torch.uint8))
    return {"holds": tensor.is_pinned() and right, "says": f"{seconds:.2f} s, {4 / seconds:.1f} GiB/s"}


def growth() -> Found:
    """Whether a tier that has grown is read and written behind its first registration, by a kernel and by a copy."""
    small, large = ((pages, 8, PAGE, 2, 128) for pages in (16, 32))
    tensor = host_memory.host_empty(small, torch.bfloat16, CUDA)
    start = time.perf_counter()
    grown = host_memory.host_grown(tensor, large, CUDA)
    seconds = time.perf_counter() - start
    if grown is None or grown.data_ptr() != tensor.data_ptr():
        return {"holds": False, "says": "it did not grow where it is"}
    k, v = torch.randn(2, 1, 8, 1, 128, device=CUDA, dtype=torch.bfloat16)
    right, table = [], torch.arange(32)[None]
    for token in (4095, 4096, 8191):
        triton_copy.write_through(k, v, torch.cat([torch.tensor([[token, 0, 0, 0]]), table], 1).to(CUDA), grown)
        torch.cuda.synchronize()
        at = tokens_of(Pages(grown, table), token, token + 1)
        right.append(torch.equal(at, torch.stack([k, v], 3).cpu()) and torch.equal(at.to(CUDA)[:, :, :, 0], k))
    return {"holds": all(right), "says": f"{right}; {grown.nbytes / 2 / seconds / GIB:.1f} GiB/s pinned"}


def copy_between_registrations() -> Found:
    """Whether one copy may cross from one registration into the next. Nothing here needs it: it is to be known."""
    memory = host_memory.PinnedMap(-1, 2 << 20, **host_memory.MAP_FLAGS)
    start = torch.frombuffer(memory, dtype=torch.uint8)
    halves = [host_memory.register(start.data_ptr() + at, 1 << 20, CUDA) for at in (0, 1 << 20)]
    source = torch.arange(8192, device=CUDA).to(torch.uint8)
    try:
        across = start[(1 << 20) - 4096 : (1 << 20) + 4096]
        across.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        says = "right" if torch.equal(across, source.cpu()) else "other bytes"
    except RuntimeError as error:
        says = str(error).splitlines()[0]
    return {"holds": True, "says": f"registered {halves}, copy: {says}"}


def gather_rates(smoke: bool = False) -> Found:
    """GB/s of a gather of 512-byte pairs, beside a pinned copy's, by the number of its programs."""
    device = CUDA if torch.cuda.is_available() else torch.device("cpu")
    heads, tokens, top_k, d = (4, 256, 8, 16) if smoke else (176, 8192, 64, 128)
    dtype = torch.bfloat16 if device == CUDA else torch.half
    host = host_memory.host_empty((1, heads, tokens, 2, d), dtype, device).fill_(1)
    slots = torch.zeros(1, heads, top_k, 2, d, dtype=dtype, device=device)
    index = torch.full((1, heads, top_k), -1, dtype=torch.int32, device=device)
    selected = (torch.arange(top_k, device=device, dtype=torch.int32) * (tokens // top_k)).expand_as(index).contiguous()
    moved = torch.zeros(1, dtype=torch.int64, device=device)
    pinned = limits(device, 1 << (16 if smoke else 28), 5)["to device"]

    def timed(programs: int) -> float:
        fetch = partial(triton_copy.gather, selected, host, slots, index, moved, programs)
        return milliseconds(lambda i: fetch(), device, 10, lambda i: index.fill_(-1))

    several = (1, 4) if smoke else (4, 8, 16, 32, 64, 176)
    rates = {programs: slots.nbytes / timed(programs) / 1e6 for programs in several}
    output = ", ".join(f"{programs}: {rate:.0f}" for programs, rate in rates.items())
    return {"holds": True, "says": f"{output} GB/s (pinned copy {pinned:.0f})", "GB/s": rates, "pinned GB/s": pinned}


def nodes() -> dict[str, set[int]]:
    """The CPUs of this process by NUMA node; one node if the system does not list nodes."""
    allowed, found = os.sched_getaffinity(0), dict[str, set[int]]()
    for path in sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")):
        parts = (part.partition("-") for part in path.read_text().strip().split(",") if part)
        cpus = {cpu for first, _, last in parts for cpu in range(int(first), int(last or first) + 1)}
        if cpus & allowed:
            found[path.parent.name] = cpus & allowed
    return found or {"node0": allowed}


def gathers_over_a_large_tier(smoke: bool = False) -> Found:
    """GB/s of gathers over 32 GiB (or half of the free memory), by NUMA node.

    Pairs have 16 or 8 bits and even or random distances. The number of programs is that of a fetch ahead or of a
    correction.
    """
    device = CUDA if torch.cuda.is_available() else torch.device("cpu")
    heads, top_k, d = (4, 8, 16) if smoke else (192, 64, 128)
    dtype = torch.bfloat16 if device == CUDA else torch.half
    size = 1 << 20 if smoke else min(32 << 30, host_memory.free_memory() // 2)
    slots = torch.zeros(1, heads, top_k, 2, d, dtype=dtype, device=device)
    index = torch.full((1, heads, top_k), -1, dtype=torch.int32, device=device)
    moved = torch.zeros(1, dtype=torch.int64, device=device)
    rates, everywhere = dict[str, float](), os.sched_getaffinity(0)
    for (node, cpus), stored in itertools.product(nodes().items(), (dtype, ROUNDED)):
        width = rounded_width(d) if stored == ROUNDED else d
        tokens = size // (heads * 2 * width * stored.itemsize) // PAGE * PAGE
        os.sched_setaffinity(0, cpus)  # pages are of the node that touches them first
        host = host_memory.host_empty((1, heads, tokens, 2, width), stored, device).fill_(1)
        os.sched_setaffinity(0, everywhere)
        even = torch.arange(top_k, dtype=torch.int32).mul(tokens // top_k).expand(1, heads, -1)
        orders = {"even": even, "random": torch.randint(tokens, (1, heads, top_k), dtype=torch.int32)}
        for (order, first), programs in itertools.product(orders.items(), (triton_copy.PROGRAMS, heads)):
            turns = [
                ((first + turn * 977) % tokens).to(device).contiguous() for turn in range(10)
            ]  # none finds the last

            def fetch(i: int, turns: list[Tensor] = turns, host: Tensor = host, programs: int = programs) -> None:
                triton_copy.gather(turns[i % len(turns)], host, slots, index, moved, programs)

            took = milliseconds(fetch, device, 10, lambda i: index.fill_(-1))
            told = f"{node}, {8 * stored.itemsize} bits, {order}, {programs} programs"
            rates[told] = heads * top_k * 2 * width * stored.itemsize / took / 1e6
        del host
        host_memory.release_host_memory()
    output = "; ".join(f"{name}: {rate:.0f}" for name, rate in rates.items())
    return {"holds": True, "says": f"GB/s of {size / 2**30:.1f} GiB: {output}", "GB/s": rates, "GiB": size / 2**30}


PROBES: dict[str, Callable[..., Found]] = {
    "subnormal products": subnormal_products,
    "same address": same_address,
    "registration of 4 GiB": registration,
    "growth of a tier": growth,
    "copy between registrations": copy_between_registrations,
    "gather by programs": gather_rates,
    "gather over 32 GiB": gathers_over_a_large_tier,
}
# They have a small form, for a smoke run.
ANYWHERE = ("gather by programs", "gather over 32 GiB")
# Nothing depends on its answer, not even where that is the end of its process.
ONLY_TO_BE_KNOWN = ("copy between registrations",)


def run(name: str, smoke: bool) -> Found:
    """Run one probe in a new process."""
    command = [sys.executable, __file__, "--one", name, *(["--smoke"] if smoke else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        output = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"holds": name in ONLY_TO_BE_KNOWN, "says": output[-1]}
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--one", choices=PROBES, help=argparse.SUPPRESS)
    args, device = parsed(parser, "gpu_probe", arguments)
    if args.one:
        print(json.dumps(PROBES[args.one](*([args.smoke] if args.one in ANYWHERE else []))))
        return 0
    results = Results(args.out, "benchmarks/gpu_probe.py", device, args.resume, smoke=args.smoke)
    results.rows[:] = [row for row in results.rows if row["holds"]]  # failed probes run again
    for name in PROBES if device == CUDA else ANYWHERE:
        if not results.has(probe=name):
            results.add({"probe": name, **run(name, args.smoke)})
    rows = [(row["probe"], "yes" if row["holds"] else "NO", row["says"]) for row in results.rows]
    print(tabulate(rows, ("", "as taken for", ""), disable_numparse=True))
    return 0 if all(row["holds"] for row in results.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
