"""From which context length on a GPU gains: below it a session keeps its cache in 16 bits (option `min_context`)."""

from __future__ import annotations

import torch

from specache_compile.options import MethodOptions

# Tokens, by the name that CUDA has for the device. Only what benchmarks/gpu_decode.py measured may stand here.
MEASURED: dict[str, int] = {}


def min_context(options: MethodOptions, device: torch.device) -> int:
    """Tokens from which the options' tiers are used. "auto": what was measured on this device, 0 where nothing was. 0
    too where memory chooses the bits: they are 16 where there is room."""
    if options.memory is not None:
        return 0
    if isinstance(options.min_context, int):
        return options.min_context
    return MEASURED.get(torch.cuda.get_device_name(device), 0) if device.type == "cuda" else 0
