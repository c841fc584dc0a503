"""What a state tensor is: declared once, and all that follows of it: bytes, place, growth, crop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The state tensors of one layer, by their fields' names.
LayerState = dict[str, Tensor]


@dataclass(frozen=True)
class LayerShape:
    """What one site keeps of a token.

    heads: KV heads.
    head_dim: d, channels of a key, and of a value.
    number: the site's.
    biased_keys: a bias is added to the keys before RoPE.
    """

    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    number: int = 0
    biased_keys: bool = False

    def __str__(self) -> str:
        return f"{self.heads} KV heads of {self.head_dim} channels, {self.dtype}, on {self.device}"


@dataclass(frozen=True)
class Cropped:
    """How a cache was cut.

    length: tokens that are left.
    low_bit: tokens that are left in the low-bit tier.
    low_bit_before: tokens that were there.
    """

    length: int
    low_bit: int
    low_bit_before: int


def of_the_model(options: Any, layer: LayerShape) -> torch.dtype:
    return layer.dtype


@dataclass(frozen=True)
class Field:
    """One state tensor of a layer, and the graph input that is named after it (a name that no model's input has).

    tier: where its bytes count; "measure": nowhere.
    shape: (options, layer, batch, capacity in tokens) → [B, H, n, ...], where n may grow with the capacity.
    dtype: (options, layer) → dtype.
    on_host: the tensor lives in host memory, pinned where there is a GPU, in segments (`kernels/state/segments.py`).
    empty: what a place holds that nothing was put in.
    by_row: the tensor has a batch; a count over all rows has none.
    by_page: the tensor grows with the tokens, and can be in pages (`kernels/state/page_table.py`): P pages have the
        shape of P rows with 256 tokens each.
    has_all_pairs: the tensor has the pair of every cached token, [B, H, C, K|V, d] or in segments, exact or as e4m3
        codes (uint8).
    on_crop: (the layer's state, what was cropped), run once a layer for each field that has it.
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
    def token_dim(self) -> int:
        """The dimension that grows."""
        return 0 if self.on_host else 2

    @property
    def row_dim(self) -> int:
        """The batch's dimension."""
        return 1 if self.on_host else 0

    @property
    def is_the_cache(self) -> bool:
        """Whether the tensor has every pair as the model made it; on the host, where no option has pairs rounded."""
        return self.has_all_pairs and (self.on_host or self.dtype is of_the_model)

    def device(self, layer: LayerShape) -> torch.device:
        """The CPU for what is on the host, the model's for the rest; on the meta device nothing lives anywhere."""
        return torch.device("cpu") if self.on_host and layer.device.type != "meta" else layer.device

    def nbytes(self, options: Any, layer: LayerShape, batch: int, capacity: int) -> int:
        shape = torch.Size(self.shape(options, layer, batch, capacity))
        return shape.numel() * self.dtype(options, layer).itemsize


def always(dtype: torch.dtype) -> Callable[[Any, LayerShape], torch.dtype]:
    """The dtype of a field that is the same for every model."""
    return lambda options, layer: dtype
