"""The logits that a corrected decode attention keeps between its halves. On a GPU they are 16-bit offsets from a base.

A base is the largest logit of its tile in float32, or float32's minimum without visible tokens. An offset of -x has an
error of at most x·2⁻¹¹. The weight's error is x·e⁻ˣ·2⁻¹¹ ≤ 2⁻¹¹/e of the tile's largest weight, even for large logits
from biased keys. On a CPU logits are float32 without a base.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Tokens that share one base. A tile is one quantised group, or this many 16-bit pairs.
LOGIT_BLOCK = 16


def whole_logits(q: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Allocate a CPU's float32 logits [B, Hq, lanes, C] of a query [B, Hq, lanes, d], and an empty base
    [B, Hq, lanes, 0]."""
    return _room(q, capacity, torch.float32), _room(q, 0, torch.float32)


def based_logits(q: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Allocate a GPU's logits in `kept_dtype`, and their base [B, Hq, lanes, C/16] in float32."""
    return _room(q, capacity, kept_dtype(q.dtype)), _room(q, capacity // LOGIT_BLOCK, torch.float32)


def _room(q: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    return q.new_empty((*q.shape[:3], columns), dtype=dtype)


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a GPU's kept logits for a model's dtype; a float32 model keeps float32."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def bytes_of_logit(dtype: torch.dtype) -> float:
    """Return the bytes of a logit on a GPU, including its share of a base."""
    return kept_dtype(dtype).itemsize + 4 / LOGIT_BLOCK
