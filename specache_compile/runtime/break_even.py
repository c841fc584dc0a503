"""From which context length on a GPU gains: below it a session keeps its cache in 16 bits (option `min_context`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch

from specache_compile.methods.field import LayerShape
from specache_compile.options import MethodOptions

from .state import full_cache_bytes

# Tokens of one row, by the name that CUDA has for the device. Only what benchmarks/gpu_decode.py measured may stand
# here.
MEASURED: dict[str, int] = {}
# Until then, by a word of that name: what benchmarks/computed_steps.py computes for an 8B model, where a step fetches
# nothing, where it fetches ahead, and where it corrects.
COMPUTED: dict[str, tuple[int, int, int]] = {
    "A6000": (1600, 3200, 6784),
    "A100": (4160, 12160, 20544),
    "H100": (7232, 19328, 34048),
    "H200": (12096, 33344, 59648),
    "4090": (2112, 4800, 8576),
    "L4": (704, 1280, 2432),
}


def min_context(options: MethodOptions, device: torch.device, rows: int = 1) -> int:
    """Tokens of each row from which the options' tiers are used.

    "auto": what was measured on this device, or computed for it, shared out over so many rows; 0 where neither is
    known. Also 0 where memory chooses the bits, which are 16 where there is room.
    """
    if options.memory is not None:
        return 0
    if isinstance(options.min_context, int):
        return options.min_context
    return known(torch.cuda.get_device_name(device), options) // rows if device.type == "cuda" else 0


def known(name: str, options: MethodOptions) -> int:
    """Tokens that were measured, or computed, for the device that CUDA calls so; 0: neither."""
    if name in MEASURED:
        return MEASURED[name]
    kind = 0 if not options.top_k else 1 if options.correct == "never" else 2
    word = word_of(name, COMPUTED)
    return 0 if word is None else COMPUTED[word][kind]


def word_of(name: str, words: Iterable[str]) -> str | None:
    """The one of `words` by which CUDA's name for a device tells its kind; None where it is none of them."""
    if re.search(r"\b(MIG|Laptop)\b", name):  # a part of it, or a slower one
        return None
    return next((word for word in words if re.search(rf"\b{word}\b", name)), None)


def stays_in_16_bits(
    options: MethodOptions, layers: Sequence[LayerShape], rows: int, tokens: int, room: bool = True
) -> bool:
    """Whether a cache of so many tokens is too short to gain from its tiers.

    For "auto", where `room` is asked for, the device must also have as much memory again: to grow, or to move over.
    """
    device = layers[0].device
    if tokens >= min_context(options, device, rows):
        return False
    asks = room and options.min_context == "auto"
    return not asks or full_cache_bytes(layers, rows, tokens) < free_memory(device)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had of a CUDA device, torch's own idle ones too."""
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + int(reserved)
