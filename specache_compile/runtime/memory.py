"""The option memory: as many bits as the bytes that the device's tiers may have leave room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specache_compile.errors import too_little_memory
from specache_compile.methods.field import LayerShape
from specache_compile.methods.low_bit import BITS_OF_BOTH, LowBitOptions, bytes_of_memory
from specache_compile.options import MethodOptions

from .state import predicted_bytes


def within_memory(options: MethodOptions, layers: Sequence[LayerShape], batch: int, length: int) -> MethodOptions:
    """The options with the most bits, the same in all layers, under which `length` tokens of `batch` rows fit into the
    memory that they ask for; as they are where they ask for none. OptionError where one bit does not fit."""
    if not isinstance(options, LowBitOptions) or options.memory is None:
        return options
    allowed, needed = bytes_of_memory(options.memory), 0
    for bits in sorted(BITS_OF_BOTH, reverse=True):
        chosen = replace(options, bits=bits)
        tiers = predicted_bytes(chosen, layers, batch, length)
        needed = sum(size for tier, size in tiers.items() if tier != "host")
        if needed <= allowed:
            return chosen
    raise too_little_memory(needed, allowed, length, batch)
