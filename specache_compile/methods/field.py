"""A state tensor's declaration, from which its bytes, device, growth and crop follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The state tensors of one layer, by field name.
LayerState = dict[str, Tensor]
# The tier of fields whose bytes are not counted: measurements.
MEASURE = "measure"


@dataclass(frozen=True)
class LayerShape:
    """The shape of one site's keys and values.

    heads: KV heads.
    head_dim: channels of a key, and of a value.
    number: the site's number.
    biased_keys: a bias is added to the keys before RoPE.
    ranks: the ranks that the model's KV heads are split over; `heads` are those of one.
    """

    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    number: int = 0
    biased_keys: bool = False
    ranks: int = 1

    def __str__(self) -> str:
        bias = ", whose keys have a bias" if self.biased_keys else ""
        return f"{self.heads} KV heads of {self.head_dim} channels{bias}, {self.dtype}, on {self.device}"


@dataclass(frozen=True)
class Cropped:
    """A crop of a cache.

    length: remaining tokens.
    low_bit: remaining tokens in the low-bit tier.
    low_bit_before: tokens that were in the low-bit tier.
    """

    length: int
    low_bit: int
    low_bit_before: int


def of_the_model(options: Any, layer: LayerShape) -> torch.dtype:
    return layer.dtype


@dataclass(frozen=True)
class Field:
    """One state tensor of a layer. Its graph input has the same name, which no model's input may have.

    tier: the tier that its bytes count for, or MEASURE.
    shape: (options, layer, batch, capacity in tokens) → [B, H, n, ...], where n may grow with the capacity.
    dtype: (options, layer) → dtype.
    on_host: in host memory, and pinned if there is a GPU.
    empty: the value of an unused place.
    by_row: it has a batch dimension; a count over all rows has none.
    by_page: it grows with the tokens, and is in pages (`kernels/state/page_table.py`): P pages have the shape of P rows
        with 256 tokens each. A field with rows has all of a row's elements in one piece.
    has_all_pairs: it has the pair of every cached token in pages [P, H, 256, K|V, d], exact or as e4m3 codes (uint8).
    on_crop: (the layer's state, the crop), called once a layer.
    """

    name: str
    tier: str
    shape: Callable[[Any, LayerShape, int, int], tuple[int, ...]]
    dtype: Callable[[Any, LayerShape], torch.dtype] = of_the_model
    on_host: bool = False
    empty: int = 0
    by_row: bool = True
    by_page: bool = False
    has_all_pairs: bool = False
    on_crop: Callable[[LayerState, Cropped], object] | None = None

    @property
    def is_the_cache(self) -> bool:
        """Whether it has every pair in the model's dtype; on the host, unless an option rounds them."""
        return self.has_all_pairs and (self.on_host or self.dtype is of_the_model)

    def device(self, layer: LayerShape) -> torch.device:
        """The CPU for a field on the host, else the model's device; the meta device for all fields of a meta layer."""
        return torch.device("cpu") if self.on_host and layer.device.type != "meta" else layer.device

    def nbytes(self, options: Any, layer: LayerShape, batch: int, capacity: int) -> int:
        shape = torch.Size(self.shape(options, layer, batch, capacity))
        return shape.numel() * self.dtype(options, layer).itemsize


def pairs(count: Callable[[Any, LayerShape], int]) -> Callable[[Any, LayerShape, int, int], tuple[int, ...]]:
    """The shape of `count(options, layer)` pairs of each head, [B, H, n, 2, d]."""
    return lambda options, layer, batch, capacity: (batch, layer.heads, count(options, layer), 2, layer.head_dim)


def always(dtype: torch.dtype) -> Callable[[Any, LayerShape], torch.dtype]:
    """A dtype that does not depend on the model."""
    return lambda options, layer: dtype
