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
    new, kept, lse, low_bit = attend_keys(new, read)
    hide(kept[0], slot_index)
    merged(new._replace(sinks=None), read.layout, low_bit, None, lse, values=False)
    low_bit = attend_values(new, read, kept, lse, skip_below)
    exact = attend_exact(new, read, (slots, slot_index), kept)
    out = merged(new, read.layout, low_bit, exact, lse)
    if not slots.shape[2]:
        return out, torch.full(shape_of_scores(read.tiers.codes, new.cursor), -1.0, device=out.device)
    return out, scores_of(new, read.tiers.sink_index, *kept, lse, 1)[0]


@takes(new=AttentionInputs, read=TierInputs)
def score_low_bit(new: AttentionInputs, read: TierInputs, scores: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `attention_ops.score_low_bit`; the logits are `kept_logits.based_logits`.

    Per low-bit token and KV head, it reads the key, writes and reads `bytes_of_logit`·G·lanes bytes, and writes
    4·lanes bytes of scores.
    """
    new, kept, lse, low_bit = attend_keys(new, read)
    exact = attend_exact(new, read, None, kept)
    merged(new, read.layout, low_bit, exact, lse, values=False)
    if not scores:
        return *kept, lse.new_empty(0)
    return *kept, scores_of(new, read.tiers.sink_index, *kept, lse, new.q.shape[2])


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
    low_bit = attend_values(new, read, (logits, base), lse, skip_below)
    wait_for_correction(slots)
    exact = attend_exact(new, read, (slots, slot_index), None)
    return merged(new, read.layout, low_bit, exact, torch.empty_like(lse))


def attend_keys(
    new: AttentionInputs, read: TierInputs
) -> tuple[AttentionInputs, tuple[Tensor, Tensor], Tensor, Sums]:  # fmt: skip
    """Write the kept logits of the low-bit tier.

    Returns: the inputs with contiguous channels; the kept logits and their base; an empty log-sum-exp in the base's
    memory; and the tier's sums without values.
    """
    new, half = contiguous_channels(new), triton_keys if read.layout.key_bits < ROWS_FROM else triton_plain
    kept = based_logits(new.q, new.k.shape[1], shape_of_scores(read.tiers.codes, new.cursor)[2])
    return new, kept, lse_of(kept[1], new.q), half.attend_keys(new, read, kept)


def attend_values(
    new: AttentionInputs, read: TierInputs, kept: tuple[Tensor, Tensor], lse: Tensor, skip_below: float
) -> Sums:
    """Return the sums of the low-bit tier's values, weighted by kept logits relative to lse [B, Hq, lanes]."""
    cut = math.log2(skip_below) if skip_below else None
    if read.layout.value_bits < ROWS_FROM:
        return triton_values.attend_values(new, read, kept, lse, cut)
    return triton_plain.attend(new, read, kept, lse=lse, cut=cut)
