"""The host tier: all pairs in host memory, for extends, crops and fetches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specache_compile.errors import OptionError
from specache_compile.kernels.state.stored_pairs import ROUNDED, rounded_width, rounds
from specache_compile.options import MethodOptions, option

from .field import Field, LayerShape


def check_memory(name: str, value: Any) -> None:
    if value is not None and (type(value) is not int or value < 0):
        raise OptionError(f"option {name}={value!r}: accepted are a number of bytes and None")


@dataclass(frozen=True)
class HostOptions(MethodOptions):
    """Options of the methods with a host tier."""

    host_memory: int | None = option(
        None, check_memory, "most bytes of a cache's host tier; default: half of the free host memory", type=int
    )


def whole_cache(options: Any, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    """[B, H, C, K|V, d]: a pair is one contiguous read."""
    return (batch, layer.heads, capacity, 2, layer.head_dim)


def as_stored_pairs(options: Any, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    """[B, H, C, K|V, d], or w bytes of a rounded key instead of d."""
    rounded = rounds(options.bits_on_host, layer.dtype)
    return (batch, layer.heads, capacity, 2, rounded_width(layer.head_dim) if rounded else layer.head_dim)


def as_stored(options: Any, layer: LayerShape) -> torch.dtype:
    return ROUNDED if rounds(options.bits_on_host, layer.dtype) else layer.dtype


HOST = Field("host", "host", as_stored_pairs, as_stored, on_host=True, by_page=True, has_all_pairs=True)
