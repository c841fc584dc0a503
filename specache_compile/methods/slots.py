"""The slots: the k pairs of each KV head that the next step needs, on the device in 16 bits."""

from __future__ import annotations

from typing import Any

import torch

from specache_compile.kernels.state.layout import EMPTY

from .field import MEASURE, Cropped, Field, LayerShape, LayerState, always, pairs


def pairs_to_fetch(options: Any, layer: LayerShape) -> int:
    """k for each KV head; "auto" is 64, for a layer of two KV heads 128 and of one 256: few heads select few pairs."""
    return max(64, 256 >> (layer.heads * layer.ranks - 1)) if options.top_k == "auto" else int(options.top_k)


def index_shape(options: Any, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    return (batch, layer.heads, pairs_to_fetch(options, layer))


def empty_slots(state: LayerState, cropped: Cropped) -> None:
    """Empty the slots of tokens that the crop moves out of the low-bit tier."""
    state["slot_index"].masked_fill_(state["slot_index"] >= cropped.low_bit, EMPTY)


SLOTS = Field("slots", "slots", pairs(pairs_to_fetch))
# The token in each slot, and the tokens that the next fetch copies.
SLOT_INDEX = Field("slot_index", "slots", index_shape, always(torch.int32), empty=EMPTY, on_crop=empty_slots)
SELECTED = Field("selected", "slots", index_shape, always(torch.int32), empty=EMPTY)
# Bytes of prefetches and of corrections.
FETCHED = Field("fetched", MEASURE, lambda *_: (1,), always(torch.int64), by_row=False)
CORRECTED = Field("corrected", MEASURE, lambda *_: (1,), always(torch.int64), by_row=False)
