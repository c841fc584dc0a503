"""The context length from which compression is faster on a GPU; shorter caches stay in 16 bits (option
`min_context`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch

from specache_compile.kernels.memory import host_memory
from specache_compile.methods.field import LayerShape
from specache_compile.options import MethodOptions

from .state import full_cache_bytes

# Tokens of one row, by a word of CUDA's name of the device, as benchmarks/computed_steps.py computes them for an 8B
# model: for a step that fetches nothing, one that fetches ahead, and one that corrects.
COMPUTED: dict[str, tuple[int, int, int]] = {
    "A6000": (3904, 7232, 6912),
    "A100": (10112, 19776, 20864),
    "H100": (17216, 31616, 35072),
    "H200": (26816, 48768, 57984),
    "4090": (5248, 9088, 8640),
    "L4": (1600, 2496, 2816),
}


def min_context(options: MethodOptions, device: torch.device, rows: int = 1) -> int:
    """Tokens of each row from which the cache is compressed.

    "auto" is the computed value of this device, divided by the rows, and 0 for other devices.
    """
    if isinstance(options.min_context, int):
        return options.min_context
    word = word_of(torch.cuda.get_device_name(device), COMPUTED) if device.type == "cuda" else None
    kind = 0 if not options.top_k else 2 if options.corrects else 1
    return 0 if word is None else COMPUTED[word][kind] // rows


def word_of(name: str, words: Iterable[str]) -> str | None:
    """The word that identifies a device name of CUDA; None if there is none."""
    if re.search(r"\b(MIG|Laptop)\b", name):  # a partition, or a slower device
        return None
    return next((word for word in words if re.search(rf"\b{word}\b", name)), None)


def stays_in_16_bits(
    options: MethodOptions, layers: Sequence[LayerShape], rows: int, tokens: int, room: bool = True
) -> bool:
    """Whether a cache of so many tokens is too short to be compressed.

    With "auto" and `room`, the device must also have that much memory again, for growing or compressing the cache.
    """
    device = layers[0].device
    if tokens >= min_context(options, device, rows):
        return False
    unchecked = not room or options.min_context != "auto"
    return unchecked or full_cache_bytes(layers, rows, tokens) < free_memory(device)


def free_memory(device: torch.device) -> int:
    """Free bytes of a CUDA device, torch's cached blocks included, or of the host."""
    if device.type != "cuda":
        return host_memory.free_memory()
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + int(reserved)
