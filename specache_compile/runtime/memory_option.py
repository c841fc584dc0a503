"""The option memory: the most bits whose tiers fit into so many bytes on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specache_compile.errors import OptionError
from specache_compile.methods.field import LayerShape
from specache_compile.methods.low_bit import BITS_OF_BOTH
from specache_compile.options import MethodOptions, bytes_of_memory

from .state import device_total, predicted_bytes


def within_memory(options: MethodOptions, layers: Sequence[LayerShape], batch: int, length: int) -> MethodOptions:
    """The options with the most bits, equal in all layers, whose tiers fit into the option memory.

    The tiers are those of `length` tokens of `batch` rows. If no bits fit, the options have the fewest bits; without
    the option memory they are unchanged.
    """
    if options.memory is None:
        return options
    allowed = bytes_of_memory(options.memory)
    every = [with_bits(options, bits) for bits in sorted(BITS_OF_BOTH, reverse=True)]
    return next((chosen for chosen in every if device_bytes(chosen, layers, batch, length) <= allowed), every[-1])


def with_bits(options: Any, bits: float) -> MethodOptions:
    """The options with so many bits for keys and values, and matching codes and parameters."""
    value_code = "auto" if options.value_code == "trellis" else options.value_code
    key_code = "auto" if options.key_code == "trellis" else options.key_code
    param_bits = "auto" if options.param_bits == 8 else options.param_bits
    changed: MethodOptions = replace(
        options, bits=bits, value_bits=None, key_code=key_code, value_code=value_code, param_bits=param_bits,
        host_bits=16 if bits == 16 else options.host_bits,  # nothing on the device is rounded then
    )  # fmt: skip
    return changed


def check_memory(options: MethodOptions, layers: Sequence[LayerShape], batch: int, length: int) -> None:
    """OptionError if the tiers of options from `within_memory` do not fit into the option memory."""
    if options.memory is not None:
        needed, allowed = device_bytes(options, layers, batch, length), bytes_of_memory(options.memory)
        if needed > allowed:
            raise too_little_memory(needed, allowed, length, batch)


def device_bytes(options: MethodOptions, layers: Sequence[LayerShape], batch: int, length: int) -> int:
    """Bytes of the tiers on the device."""
    return device_total(predicted_bytes(options, layers, batch, length))


def too_little_memory(needed: int, allowed: int, tokens: int, batch: int) -> OptionError:
    return OptionError(
        f"option memory: {tokens:,} tokens x batch {batch} need {needed / 2**20:,.1f} MiB on the device at 1 bit, more "
        f"than the given {allowed / 2**20:,.1f} MiB. Raise memory, or lower top_k, the batch or the context."
    )
