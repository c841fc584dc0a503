"""Triton: the two halves of a corrected decode attention, between which the slots are put right.

The CUDA implementations of `attention.score_low_bit` and `attention.attend_scored`; the kernels are those of
`triton_decode`, which has the shapes, launched for half of the work each:

    attend_tiers   low-bit keys, recent and new keys → every lane's logits (`kept_logits`), and their sums
    merge_splits   the log-sum-exp of every lane
    score_tokens   every lane's scores

    attend_tiers   those logits and low-bit values, without what was chosen for the slots, while its pairs travel
    attend_tiers   slots, recent and new in 16 bits
    merge_splits   the output
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specache_compile.kernels.state.layout import Layout
from specache_compile.kernels.state.page_table import shape_of_scores
from specache_compile.kernels.state.stored_tiers import StoredTiers

from .kept_logits import based_logits
from .triton_decode import attend, group_of, mask_form, merged, scores_of

# Every group size is a multiple of it.
SMALLEST_GROUP = 32


def score_low_bit(
    q: Tensor, k: Tensor, mask: Tensor | None, sinks: Tensor | None, cursor: Tensor, tiers: Sequence[Tensor],
    layout: Sequence[int], scale: float, softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `attention.score_low_bit`, but beyond the low-bit tier the logits hold the window's, then anything; nobody
    reads them there. Bytes a low-bit token and KV head: its keys', `bytes_of_logit`·G·lanes written and read, 4·lanes
    of scores written. FLOPs: 2·G·lanes·(d + 16·d/g)."""
    held, how = StoredTiers(*tiers), Layout(*layout)
    batch, query_heads, lanes, _ = q.shape
    form = mask_form(mask, batch, query_heads, lanes)
    kept = based_logits(q, shape_of_scores(held.codes, cursor)[2])
    sums = attend(
        q, k, k, form, cursor, held.recent, cursor, held, kept, how, scale, softcap,
        group=group_of(held.codes, held.key_params, how), values=False,
    )  # fmt: skip
    _, lse = merged(sums, q, k.shape[1], sinks, lanes, how, values=False)
    return *kept, scores_of(kept, lse, form, cursor, held, lanes)


def attend_scored(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, cursor: Tensor, logits: Tensor,
    base: Tensor, chosen: Tensor, slots: Tensor, slot_index: Tensor, tiers: Sequence[Tensor], layout: Sequence[int],
    scale: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """As `attention.attend_scored`. Bytes a low-bit token and KV head: its values', and `bytes_of_logit`·G·lanes.
    FLOPs: 2·G·lanes·(d + d/gv)."""
    held, how = StoredTiers(*tiers), Layout(*layout)
    batch, query_heads, lanes, d = q.shape
    form = mask_form(mask, batch, query_heads, lanes)
    # A tile is a group of values, at most g, and a power of two.
    value_group = d // held.value_params.shape[-1] if how.is_quantised else 1
    value_group = min(value_group, group_of(held.codes, held.key_params, how))
    kept = logits.contiguous(), base.contiguous()
    sums = attend(
        q, k, v, form, cursor, slots, slot_index, held, kept, how, scale, softcap,
        group=max(SMALLEST_GROUP, 1 << value_group.bit_length() - 1), keys=False, chosen=chosen,
    )  # fmt: skip
    return merged(sums, q, k.shape[1], sinks, 0, how)[0]
