"""The logits that a corrected decode attention keeps between its halves: on a GPU in 16 bits, above a base.

A logit is the base of its block of tokens and what is kept of it. A base is the largest logit of its tile, in float32,
or float32's smallest number where none is seen. So a half-precision number says how far below it another lies. At a
distance x that is off by x·2⁻¹¹ at most, and its weight by x·e⁻ˣ·2⁻¹¹ ≤ 2⁻¹¹/e of the tile's largest, however large all
logits are: a model whose keys have large biases loses nothing. A CPU's are whole, in float32, and have no base.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Tokens that have one base. A tile is that of one quantised group, or of this many pairs in 16 bits.
LOGIT_BLOCK = 16


def whole_logits(q: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Room for a CPU's logits [B, Hq, lanes, C] of a query [B, Hq, lanes, d], float32, and a base of none
    [B, Hq, lanes, 0]."""
    return _room(q, capacity, torch.float32), _room(q, 0, torch.float32)


def based_logits(q: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Room for a GPU's, in `kept_dtype`, and for their base [B, Hq, lanes, C/16] float32."""
    return _room(q, capacity, kept_dtype(q.dtype)), _room(q, capacity // LOGIT_BLOCK, torch.float32)


def _room(q: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    return q.new_empty((*q.shape[:3], columns), dtype=dtype)


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a GPU keeps of a logit, of a model of this dtype: nothing is lost of a float32 model's."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def bytes_of_logit(dtype: torch.dtype) -> float:
    """Bytes of a logit on a GPU, with its share of a base."""
    return kept_dtype(dtype).itemsize + 4 / LOGIT_BLOCK
