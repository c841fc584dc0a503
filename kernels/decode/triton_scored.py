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
from collections.abc import Sequence

import torch
from torch import Tensor

from specache_compile.kernels.attention.kept_logits import based_logits, lse_of
from specache_compile.kernels.codes.records import ROWS_FROM
from specache_compile.kernels.movement.copy_stream import wait_for_correction
from specache_compile.kernels.movement.triton_select_logits import hide
from specache_compile.kernels.state.layout import Layout
from specache_compile.kernels.state.page_table import shape_of_scores
from specache_compile.kernels.state.stored_tiers import StoredTiers

from . import triton_keys, triton_plain, triton_values
from .triton_decode import DecodeInputs, Sums, empty_sums, mask_form, merged, scores_of
from .triton_exact import attend_exact


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, cursor: Tensor, slots: Tensor,
    slot_index: Tensor, tiers: Sequence[Tensor], layout: Sequence[int], scale: float, softcap: float | None,
    skip_below: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `attention_ops.decode_attention`; the device reads all lengths, so that the step can be captured.

    Per low-bit token and KV head, it reads the key and value, and writes and reads `bytes_of_logit`·G·lanes bytes.
    """
    inputs = inputs_of(q, k, v, mask, cursor, tiers, layout, scale, softcap)
    logits, base = based_logits(q, k.shape[1], shape_of_scores(inputs.tiers.codes, cursor)[2])
    lse = lse_of(base, q)
    low_bit = attend_keys(inputs, logits, base)
    hide(logits, slot_index)
    rows, _, padded = low_bit.peaks.shape
    merged(inputs, None, low_bit, empty_sums(rows, 0, padded, 0, q.device), lse, values=False)
    low_bit = attend_values(inputs, logits, base, lse, skip_below)
    exact = attend_exact(inputs, slots, slot_index, values=True, kept=(logits, base))
    out = merged(inputs, sinks, low_bit, exact, lse)
    if not slots.shape[2]:
        return out, torch.full(shape_of_scores(inputs.tiers.codes, cursor), -1.0, device=q.device)
    return out, scores_of(inputs, logits, base, lse, 1)[0]


def score_low_bit(
    q: Tensor, k: Tensor, mask: Tensor | None, sinks: Tensor | None, cursor: Tensor, tiers: Sequence[Tensor],
    layout: Sequence[int], scale: float, softcap: float | None, scores: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `attention_ops.score_low_bit`; the logits are `kept_logits.based_logits`.

    Per low-bit token and KV head, it reads the key, writes and reads `bytes_of_logit`·G·lanes bytes, and writes
    4·lanes bytes of scores.
    """
    inputs = inputs_of(q, k, k, mask, cursor, tiers, layout, scale, softcap)
    logits, base = based_logits(q, k.shape[1], shape_of_scores(inputs.tiers.codes, cursor)[2])
    lse = lse_of(base, q)
    low_bit = attend_keys(inputs, logits, base)
    exact = attend_exact(inputs, None, None, values=False, kept=(logits, base))
    merged(inputs, sinks, low_bit, exact, lse, values=False)
    if not scores:
        return logits, base, logits.new_empty(0, dtype=torch.float32)
    return logits, base, scores_of(inputs, logits, base, lse, q.shape[2])


def attend_scored(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, cursor: Tensor, logits: Tensor,
    base: Tensor, chosen: Tensor, slots: Tensor, slot_index: Tensor, tiers: Sequence[Tensor], layout: Sequence[int],
    scale: float, softcap: float | None, skip_below: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute `attention_ops.attend_scored`; the chosen tokens' kept logits become -inf.

    Per low-bit token and KV head, it reads the value and `bytes_of_logit`·G·lanes bytes.
    """
    inputs = inputs_of(q, k, v, mask, cursor, tiers, layout, scale, softcap)
    hide(logits, chosen)
    low_bit = attend_values(inputs, logits, base, lse_of(base, q), skip_below)
    wait_for_correction(cursor, slots)
    exact = attend_exact(inputs, slots, slot_index, values=True, kept=None)
    return merged(inputs, sinks, low_bit, exact, torch.empty_like(lse_of(base, q)))


def inputs_of(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cursor: Tensor, tiers: Sequence[Tensor],
    layout: Sequence[int], scale: float, softcap: float | None,
) -> DecodeInputs:  # fmt: skip
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    form = mask_form(mask, *q.shape[:3])
    return DecodeInputs(q, k, v, form, cursor, StoredTiers(*tiers), Layout(*layout), scale, softcap)


def attend_keys(inputs: DecodeInputs, logits: Tensor, base: Tensor) -> Sums:
    """Write the kept logits of the low-bit tier; returns their sums without values."""
    half = triton_keys if inputs.layout.key_bits < ROWS_FROM else triton_plain
    return half.attend_keys(inputs, logits, base)


def attend_values(inputs: DecodeInputs, logits: Tensor, base: Tensor, lse: Tensor, skip_below: float) -> Sums:
    """Return the sums of the low-bit tier's values, weighted by kept logits relative to lse [B, Hq, lanes]."""
    half = triton_values if inputs.layout.value_bits < ROWS_FROM else triton_plain
    return half.attend_values(inputs, logits, base, lse, math.log2(skip_below) if skip_below else None)
