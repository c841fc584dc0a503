"""A lower bound of a decode step's time: the bytes that it reads, divided by the machine's bandwidth."""

from __future__ import annotations

import time
from typing import Any

import torch

GIB = 1 << 30
READS = 12


def bandwidth(device: torch.device) -> float:
    """Bytes per second: the best of several reads of 1 GiB, by all threads or by the whole GPU."""
    numbers = torch.ones(GIB // 4, device=device)
    best = float("inf")
    for _ in range(READS):
        synchronise(device)
        start = time.perf_counter()
        numbers.sum()
        synchronise(device)
        best = min(best, time.perf_counter() - start)
    return GIB / best


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def weight_bytes(model: Any) -> int:
    """Bytes of the weights that a step reads: all except an untied embedding table."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = head is not None and head.weight is table
    return sum(p.nbytes for p in model.parameters()) - (0 if tied else table.nbytes)


def floor(weights: int, device_bytes: int, rate: float) -> float:
    """Milliseconds to read the weights and the cache's bytes on the device at `rate` bytes per second."""
    return 1e3 * (weights + device_bytes) / rate
