"""The host tier: all pairs in host memory, for extends, crops and fetches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specache_compile.kernels.attention.attention_ops import BLOCK
from specache_compile.kernels.state.stored_pairs import ROUNDED, rounded_width, rounds
from specache_compile.options import MethodOptions, whole

from .field import Field, LayerShape


@dataclass(frozen=True)
class HostOptions(MethodOptions):
    """Options of the methods with a host tier."""

    host_memory: int | None = whole(
        None, 0, "most bytes of a cache's host tier; default: half of the free host memory", words=(None,),
        unit="a number of bytes",
    )  # fmt: skip


@dataclass(frozen=True)
class DraftOptions(HostOptions):
    """Options of the methods with a host tier whose decode step is approximate: it may draft, and an exact pass over
    the host tier verifies (arXiv 2404.11912)."""

    verify: int | str | None = whole(
        None, 1,
        "tokens that the decode phase drafts and one exact pass over the host tier verifies, so that generate returns "
        "the full cache's tokens. auto: more while all are accepted, else fewer",
        most=BLOCK, words=("auto", None), unit="a number of tokens", metavar="N",
    )  # fmt: skip


def whole_cache(options: Any, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    """[B, H, C, K|V, d], where a pair is one contiguous read; w bytes of a rounded key instead of d."""
    rounded = rounds(options.bits_on_host, layer.dtype)
    return (batch, layer.heads, capacity, 2, rounded_width(layer.head_dim) if rounded else layer.head_dim)


def as_stored(options: Any, layer: LayerShape) -> torch.dtype:
    return ROUNDED if rounds(options.bits_on_host, layer.dtype) else layer.dtype


HOST = Field("host", "host", whole_cache, as_stored, on_host=True, by_page=True, has_all_pairs=True)
