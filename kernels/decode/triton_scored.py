"""Triton: the attention ops of a decode step: the keys' half, what the slots hold, the values' half."""

# decode_attention   attend_keys     low-bit keys → kept logits, except tokens in slots, and their sums
#                    merge_splits    the log-sum-exp of the low-bit tier, to which weights are relative
#                    attend_values   kept logits and low-bit values
#                    attend_exact    slots, ring, new pairs and sinks in 16 bits; their logits are kept for scores
#                    merge_splits    the output
#                    score_tokens    the last lane's scores
# score_low_bit      attend_keys, attend_exact (keys), merge_splits, score_tokens
# attend_scored      attend_values while chosen pairs travel, attend_exact, merge_splits

from __future__ import annotations

import math

import torch
from torch import Tensor

from specache_compile.kernels.attention.kept_logits import based_logits, lse_of
from specache_compile.kernels.codes.records import ROWS_FROM
from specache_compile.kernels.movement.copy_stream import wait_for_correction
from specache_compile.kernels.movement.triton_select_logits import hide
from specache_compile.kernels.state.operands import AttentionInputs, TierInputs, takes
from specache_compile.kernels.state.page_table import shape_of_scores

from . import triton_keys, triton_plain, triton_values
from .triton_decode import Sums, contiguous_channels, merged, scores_of
from .triton_exact import attend_exact


@takes(new=AttentionInputs, read=TierInputs)
def decode_attention(
    new: AttentionInputs, slots: Tensor, slot_index: Tensor, read: TierInputs, skip_below: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute `attention_ops.decode_attention`; the device reads all lengths, so that the step can be captured.

    Per low-bit token and KV head, it reads the key and value, and writes and reads `bytes_of_logit`·G·lanes bytes.
    """
    new, (logits, base, lse) = contiguous_channels(new), kept_of(new, read)
    low_bit = attend_keys(new, read, logits, base)
    hide(logits, slot_index)
    merged(new._replace(sinks=None), read.layout, low_bit, None, lse, values=False)
    low_bit = attend_values(new, read, logits, base, lse, skip_below)
    exact = attend_exact(new, read, slots, slot_index, values=True, kept=(logits, base))
    out = merged(new, read.layout, low_bit, exact, lse)
    if not slots.shape[2]:
        return out, torch.full(shape_of_scores(read.tiers.codes, new.cursor), -1.0, device=out.device)
    return out, scores_of(new, read.tiers.sink_index, logits, base, lse, 1)[0]


@takes(new=AttentionInputs, read=TierInputs)
def score_low_bit(new: AttentionInputs, read: TierInputs, scores: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `attention_ops.score_low_bit`; the logits are `kept_logits.based_logits`.

    Per low-bit token and KV head, it reads the key, writes and reads `bytes_of_logit`·G·lanes bytes, and writes
    4·lanes bytes of scores.
    """
    new, (logits, base, lse) = contiguous_channels(new), kept_of(new, read)
    low_bit = attend_keys(new, read, logits, base)
    exact = attend_exact(new, read, None, None, values=False, kept=(logits, base))
    merged(new, read.layout, low_bit, exact, lse, values=False)
    if not scores:
        return logits, base, logits.new_empty(0, dtype=torch.float32)
    return logits, base, scores_of(new, read.tiers.sink_index, logits, base, lse, new.q.shape[2])


@takes(new=AttentionInputs, read=TierInputs)
def attend_scored(
    new: AttentionInputs, logits: Tensor, base: Tensor, chosen: Tensor, slots: Tensor, slot_index: Tensor,
    read: TierInputs, skip_below: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute `attention_ops.attend_scored`; the chosen tokens' kept logits become -inf.

    Per low-bit token and KV head, it reads the value and `bytes_of_logit`·G·lanes bytes.
    """
    new, lse = contiguous_channels(new), lse_of(base, new.q)
    hide(logits, chosen)
    low_bit = attend_values(new, read, logits, base, lse, skip_below)
    wait_for_correction(slots)
    exact = attend_exact(new, read, slots, slot_index, values=True, kept=None)
    return merged(new, read.layout, low_bit, exact, torch.empty_like(lse))


def kept_of(new: AttentionInputs, read: TierInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the kept logits of the low-bit tier, their base, and the log-sum-exp in the base's memory."""
    logits, base = based_logits(new.q, new.k.shape[1], shape_of_scores(read.tiers.codes, new.cursor)[2])
    return logits, base, lse_of(base, new.q)


def attend_keys(new: AttentionInputs, read: TierInputs, logits: Tensor, base: Tensor) -> Sums:
    """Write the kept logits of the low-bit tier; returns their sums without values."""
    half = triton_keys if read.layout.key_bits < ROWS_FROM else triton_plain
    return half.attend_keys(new, read, logits, base)


def attend_values(
    new: AttentionInputs, read: TierInputs, logits: Tensor, base: Tensor, lse: Tensor, skip_below: float
) -> Sums:
    """Return the sums of the low-bit tier's values, weighted by kept logits relative to lse [B, Hq, lanes]."""
    half = triton_values if read.layout.value_bits < ROWS_FROM else triton_plain
    return half.attend_values(new, read, logits, base, lse, math.log2(skip_below) if skip_below else None)
