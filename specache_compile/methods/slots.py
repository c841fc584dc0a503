"""The slots: on the device, in 16 bits, the k pairs of each KV head that the next step wants."""

from __future__ import annotations

from typing import Any

import torch

from specache_compile.kernels.state.stored_tiers import EMPTY

from .field import Cropped, Field, LayerShape, LayerState, always


def slots_shape(options: Any, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    return (batch, layer.heads, options.top_k, 2, layer.head_dim)


def index_shape(options: Any, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    return (batch, layer.heads, options.top_k)


def empty_slots(state: LayerState, cropped: Cropped) -> None:
    """Slots hold pairs of the low-bit tier alone."""
    state["slot_index"].masked_fill_(state["slot_index"] >= cropped.low_bit, EMPTY)


SLOTS = Field("slots", "slots", slots_shape)
# The token in each slot, and those that the next fetch is to bring.
SLOT_INDEX = Field("slot_index", "slots", index_shape, always(torch.int32), empty=EMPTY, on_crop=empty_slots)
SELECTED = Field("selected", "slots", index_shape, always(torch.int32), empty=EMPTY)
# Bytes that fetches have brought ahead, those that corrections have, and the hit rate's sums (`hit_rate.py`).
FETCHED = Field("fetched", "measure", lambda *_: (1,), always(torch.int64), by_row=False)
CORRECTED = Field("corrected", "measure", lambda *_: (1,), always(torch.int64), by_row=False)
TALLY = Field("tally", "measure", lambda *_: (3,), always(torch.float64), by_row=False)
