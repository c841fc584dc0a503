"""Triton: `attention_ops.score_low_bit` and `attend_scored`, which launch `triton_decode`'s kernels for halves."""

# The first half:
#     attend_tiers   low-bit keys, recent and new keys → every lane's logits (`kept_logits`), and their sums
#     merge_splits   the log-sum-exp of every lane
#     score_tokens   every lane's scores
# The second half:
#     attend_tiers   logits and low-bit values of tokens that are not chosen for the slots, while chosen pairs travel
#     attend_tiers   slots, recent and new pairs in 16 bits
#     merge_splits   the output

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specache_compile.kernels.state.layout import Layout
from specache_compile.kernels.state.page_table import shape_of_scores
from specache_compile.kernels.state.stored_tiers import StoredTiers

from .kept_logits import based_logits
from .triton_decode import attend, group_of, mask_form, merged, scores_of

# Every group size is a multiple of this.
SMALLEST_GROUP = 32


def score_low_bit(
    q: Tensor, k: Tensor, mask: Tensor | None, sinks: Tensor | None, cursor: Tensor, tiers: Sequence[Tensor],
    layout: Sequence[int], scale: float, softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `attention_ops.score_low_bit`; after the low-bit tier's logits follow the window's, which no op reads.

    Per low-bit token and KV head, it reads the key, writes and reads `bytes_of_logit`·G·lanes bytes, and writes
    4·lanes bytes of scores. FLOPs: 2·G·lanes·(d + 16·d/g).
    """
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
    """Compute `attention_ops.attend_scored`.

    Per low-bit token and KV head, it reads the values and `bytes_of_logit`·G·lanes bytes. FLOPs: 2·G·lanes·(d + d/gv).
    """
    held, how = StoredTiers(*tiers), Layout(*layout)
    batch, query_heads, lanes, d = q.shape
    form = mask_form(mask, batch, query_heads, lanes)
    # A tile is a group of values, at most g tokens, a power of two.
    value_group = d // held.value_params.shape[-1] if how.is_quantised else 1
    value_group = min(value_group, group_of(held.codes, held.key_params, how))
    kept = logits.contiguous(), base.contiguous()
    sums = attend(
        q, k, v, form, cursor, slots, slot_index, held, kept, how, scale, softcap,
        group=max(SMALLEST_GROUP, 1 << value_group.bit_length() - 1), keys=False, chosen=chosen,
    )  # fmt: skip
    return merged(sums, q, k.shape[1], sinks, 0, how)[0]
