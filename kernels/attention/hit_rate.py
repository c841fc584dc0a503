"""Hit rate of slots and recent tier against the exact attention, computed only on request."""

from __future__ import annotations

import torch
from torch import Tensor

from specache_compile.kernels.state.by_rows import by_rows
from specache_compile.kernels.state.by_token import tokens_of
from specache_compile.kernels.state.cursor import LENGTH, LOW_BIT
from specache_compile.kernels.state.operands import AttentionInputs, takes
from specache_compile.kernels.state.page_table import Pages
from specache_compile.kernels.state.stored_pairs import decoded

from .attention_ops import grouped_bias, hidden_by, product, weights_of


@by_rows()
@takes(new=AttentionInputs)
def measure(
    new: AttentionInputs, host: Pages, slot_index: Tensor, sink_index: Tensor, tally: Tensor, scale: float,
    softcap: float | None,
) -> None:  # fmt: skip
    """Add lane 0's hit rate to `tally` float64 [3]: covered attention mass, covered share of its top-k, counted heads.

    The exact attention reads the whole host tier, which is slow. Slots, sinks, recent tier and the new pair are
    covered; top-k is over the low-bit tier's tokens without sinks. Shapes as in `decode_attention`.
    """
    q, k, _, mask, sinks, cursor = new
    length, low_bit = (max(0, int(cursor[0, i])) for i in (LENGTH, LOW_BIT))
    heads = k.shape[1]
    query = q[:, :, :1].float().unflatten(1, (heads, -1)) * scale
    pairs = decoded(tokens_of(host, 0, length), k.dtype, k.shape[-1])
    cached = pairs[..., 0, :]
    logits = product(query, torch.cat([cached.to(k.device), k[:, :, :1]], dim=2), softcap)
    if mask is not None:
        logits = logits + grouped_bias(mask[:, :, :1], heads, length + 1)
    sink = None if sinks is None else sinks.float().view(heads, -1, 1, 1)
    attention = weights_of([logits], sink)[0].sum((2, 3))  # [B, H, n + 1]
    kept = hidden_by(sink_index.expand(-1, heads, -1), low_bit)
    present = torch.zeros_like(attention, dtype=torch.bool)
    present[:, :, :low_bit] = kept | hidden_by(slot_index, low_bit)
    missable = attention[:, :, :low_bit].masked_fill(kept, -1.0)
    best = missable.topk(min(slot_index.shape[-1], low_bit), dim=-1).indices
    # Fewer than k tokens may be visible; a masked token in the top-k is no miss.
    covered = present | (attention == 0)
    recall = covered.gather(2, best).float().mean(-1) if best.shape[-1] else torch.ones_like(attention[:, :, 0])
    present[:, :, low_bit:] = True
    mass = (attention * present).sum(-1) / attention.sum(-1)
    tally += torch.stack([mass.sum(), recall.sum(), mass.new_tensor(mass.numel())]).to(tally)
