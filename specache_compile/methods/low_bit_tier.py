"""The tiers on the device but the slots: low-bit tier, sinks and window; the fields of `StoredTiers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specache_compile.errors import OptionError, no_host_tier
from specache_compile.kernels.codes.records import stored_dim
from specache_compile.kernels.state.layout import EMPTY, Layout
from specache_compile.kernels.state.page_table import tokens_of
from specache_compile.kernels.state.stored_pairs import decoded

from .field import Cropped, Field, LayerShape, LayerState, always, pairs
from .low_bit import LowBitOptions


def check_head_dim(layout: Layout, head_dim: int) -> None:
    """OptionError if heads of this size cannot be stored in this layout."""
    if layout.is_rotated and head_dim % 2:
        raise OptionError(f"option setting: head_dim {head_dim} is odd and cannot be rotated. Pass setting='paper'")


def codes_shape(options: LowBitOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    check_head_dim(options.layout, layer.head_dim)
    return (batch, layer.heads, capacity, options.layout.width(layer.head_dim))


def codes_dtype(options: LowBitOptions, layer: LayerShape) -> torch.dtype:
    return torch.uint8 if options.layout.is_quantised else layer.dtype


def key_params_shape(options: LowBitOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    """Scale and zero of each channel over a group of tokens; in the trellis code one scale for each key."""
    groups = capacity // options.group_size if options.layout.is_quantised else 0
    if options.has_key_trellis:
        return (batch, layer.heads, groups, 1, options.group_size)
    return (batch, layer.heads, groups, 2, stored_dim(layer.head_dim))


def value_params_shape(options: LowBitOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    """Scale and zero of each token over a group of channels; in the trellis code one scale."""
    tokens = capacity if options.layout.is_quantised else 0
    if options.has_trellis:
        return (batch, layer.heads, tokens, 1, 1)
    channels = stored_dim(layer.head_dim)
    return (batch, layer.heads, tokens, 2, channels // min(channels, options.group_size))


def params_dtype(options: LowBitOptions, layer: LayerShape) -> torch.dtype:
    return options.param_dtype(layer.dtype)


def center_shape(options: LowBitOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    """The keys' mean, and its rotation by RoPE (`kernels/state/center.py`)."""
    return (batch, layer.heads, options.center_rows(layer), layer.head_dim)


def sink_index_shape(options: LowBitOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    return (batch, 1, options.sinks)


def refill_recent(state: LayerState, cropped: Cropped) -> None:
    """After a crop into the low-bit tier, fill the window with older tokens from the host tier.

    SpecacheError, before anything has changed, if there is no host tier.
    """
    if cropped.low_bit < cropped.low_bit_before:
        if "host" not in state:
            raise no_host_tier(f"a crop to {cropped.length:,} tokens, of which {cropped.low_bit_before:,} are rounded,")
        window_from_host(state, cropped.low_bit, min(cropped.length, cropped.low_bit_before))


def window_from_host(state: Mapping[str, Any], low_bit: int, length: int) -> None:
    """Copy the tokens from `low_bit` to `length` from the host tier, as `Pages`, to the recent tier."""
    recent = state["recent"]
    places = torch.arange(low_bit, length, device=recent.device) % recent.shape[2]
    pairs = tokens_of(state["host"], low_bit, length).to(recent.device)
    recent[:, :, places] = decoded(pairs, recent.dtype, recent.shape[-1])


CODES = Field("codes", "low-bit", codes_shape, codes_dtype, by_page=True)
KEY_PARAMS = Field("key_params", "low-bit", key_params_shape, params_dtype, by_page=True)
VALUE_PARAMS = Field("value_params", "low-bit", value_params_shape, params_dtype, by_page=True)
CENTER = Field("center", "low-bit", center_shape, always(torch.float32))
# The sinks' pairs and token numbers (`kernels/state/sinks.py`).
SINK_PAIRS = Field("sink_pairs", "sinks", pairs(lambda options, layer: options.sinks))
SINK_INDEX = Field("sink_index", "sinks", sink_index_shape, always(torch.int32), empty=EMPTY)
# A ring buffer: token t is at t mod W.
RECENT = Field("recent", "recent", pairs(lambda options, layer: options.window), on_crop=refill_recent)
STORED = (CODES, KEY_PARAMS, VALUE_PARAMS, CENTER, SINK_PAIRS, SINK_INDEX, RECENT)
