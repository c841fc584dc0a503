"""What `append` stores of a layer's pairs: the operand `tiers` of the ops that attend to them, one list in one order.

The slots are no part: an op that took them would stand behind their fetch.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# In slot_index and sink_index: no token.
EMPTY = -1


class StoredTiers(NamedTuple):
    """The state tensors in the operand's order.

    codes: [B, H, C, w] in the op's `Layout`.
    key_params: [B, H, C/g, 2, d], scale and zero point of each group of keys, as their dtype says (`params.py`); in the
        trellis code a key's scale, [B, H, C/g, 1, g].
    value_params: [B, H, C, 2, d/gv], those of each group of values; in the trellis code a scale, [B, H, C, 1, 1].
    center: [B, H, 4, d], a stepped one [B, H, 3, d] (`center.py`); without one [B, H, 0, d].
    sink_pairs: [B, H, S, 2, d], the first tokens (`sinks.py`).
    sink_index: int32 [B, 1, S], which these are; -1: none.
    recent: [B, H, W, 2, d], the window.
    """

    codes: Tensor
    key_params: Tensor
    value_params: Tensor
    center: Tensor
    sink_pairs: Tensor
    sink_index: Tensor
    recent: Tensor
