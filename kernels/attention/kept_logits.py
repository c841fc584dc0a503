"""The logits that decode attention keeps between its halves. On a GPU they are 16-bit offsets from a base.

A base is the largest logit of 16 tokens in float32, or `LOWEST` without visible tokens. An offset of -x has an error of
at most x·2⁻¹². The weight's error is x·2⁻ˣ·2⁻¹² ≤ 2⁻¹² of the block's largest weight, even for large logits from biased
keys. On a CPU logits are float32 without a base.
"""

# On a GPU logits are in log2 units: logit · log2 e. A KV head has R = G·lanes query rows; row r is lane r % lanes of query
# head r // lanes. R is padded to an even R', and a padded row repeats row 0. The order is that of a product's result:
#     logits   [B, H, C/64, 2, 8, R'/2, 8]    row % 2, token // 8 in its record, row // 2, token % 8
#     base     [B, H, C/64, 2, 4, R'/2]       row % 2, token // 16 in its record, row // 2
# Tokens that leave the ring in the step follow the low-bit tier. The base is followed by each row's log-sum-exp over all
# tokens, in one tensor.

from __future__ import annotations

import torch
from torch import Tensor

from specache_compile.kernels.codes.records import RECORD

# Tokens that share one base; adjacent tokens.
LOGIT_BLOCK, OCTET = 16, 8
# The base of a block without visible tokens.
LOWEST = -3e38


def whole_logits(q: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Allocate a CPU's float32 logits [B, Hq, lanes, C] of a query [B, Hq, lanes, d], and an empty base
    [B, Hq, lanes, 0]."""
    shape = q.shape[:3]
    return q.new_empty((*shape, capacity), dtype=torch.float32), q.new_empty((*shape, 0), dtype=torch.float32)


def based_logits(q: Tensor, heads: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Allocate a GPU's logits in `kept_dtype`, and their base and log-sum-exp in float32 [n], of a query
    [B, Hq, lanes, d]."""
    batch, query_heads, lanes, _ = q.shape
    records, pairs = -(-capacity // RECORD), row_pairs(q, heads)
    shape = (batch, heads, records, 2, RECORD // OCTET, pairs, OCTET)
    bases = batch * heads * records * 2 * (RECORD // LOGIT_BLOCK) * pairs
    logits = q.new_empty(shape, dtype=kept_dtype(q.dtype))
    return logits, q.new_empty(bases + batch * query_heads * lanes, dtype=torch.float32)


def lse_of(base: Tensor, q: Tensor) -> Tensor:
    """Return the log-sum-exp [B, Hq, lanes] after the base, in log2 units; inf for a fully masked row."""
    return base[base.numel() - q.shape[:3].numel() :].view(q.shape[:3])


def row_pairs(q: Tensor, heads: int) -> int:
    """Return R'/2 of a query [B, Hq, lanes, d] with H = `heads`."""
    return -(-(q.shape[1] // heads * q.shape[2]) // 2)


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a GPU's kept logits for a model's dtype; a float32 model keeps float32."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def bytes_of_logit(dtype: torch.dtype) -> float:
    """Return the bytes of a logit on a GPU, including its share of a base."""
    return kept_dtype(dtype).itemsize + 4 / LOGIT_BLOCK
