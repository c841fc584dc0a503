"""The state tensors that `append` writes: the operand `tiers` of attention ops, a list in a fixed order.

The slots are not included, since an op that takes them must wait for their fetch.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Entry of slot_index and sink_index without a token.
EMPTY = -1


class StoredTiers(NamedTuple):
    """The state tensors in the operand's order.

    codes: [B, H, C, w] in the op's `Layout`.
    key_params: [B, H, C/g, 2, d], scale and zero point of each group of keys (formats in `params.py`).
        In the trellis code: [B, H, C/g, 1, g], the scale of each key.
    value_params: [B, H, C, 2, d/gv], scale and zero point of each group of values.
        In the trellis code: [B, H, C, 1, 1], the scale of each value.
    center: [B, H, 4, d], or a stepped center [B, H, 3, d] (`center.py`), or no center [B, H, 0, d].
    sink_pairs: [B, H, S, 2, d], the pairs of sink tokens (`sinks.py`).
    sink_index: int32 [B, 1, S], the sink tokens; -1: none.
    recent: [B, H, W, 2, d], the window.
    """

    codes: Tensor
    key_params: Tensor
    value_params: Tensor
    center: Tensor
    sink_pairs: Tensor
    sink_index: Tensor
    recent: Tensor
