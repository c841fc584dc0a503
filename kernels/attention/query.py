"""A decode step's queries in float32, and the masks over their logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specache_compile.kernels.state.cursor import LENGTH, LOW_BIT, NEXT_LOW_BIT
from specache_compile.kernels.state.operands import AttentionInputs

# An additive mask hides a token with its dtype's minimum; float16's minimum is the closest to 0.
SEEN = torch.finfo(torch.float16).min / 2


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def check_covers(mask: Tensor, tokens: int) -> None:
    """Raise ValueError if a mask has fewer columns than tokens."""
    if mask.shape[-1] < tokens:
        raise ValueError(
            f"the attention mask covers {mask.shape[-1]} tokens, but the cache and the new ones are {tokens}"
        )


def as_bias(mask: Tensor) -> Tensor:
    """Return a mask, bool or additive, as an additive float32 bias."""
    if mask.dtype != torch.bool:
        return mask.float()
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -math.inf)


def grouped_bias(mask: Tensor, heads: int, tokens: int) -> Tensor:
    """Return a mask [B|1, Hq|1, Q|1, n] as an additive float32 bias [B|1, H|1, Hq/H|1, Q|1, n]."""
    check_covers(mask, tokens)
    bias = as_bias(mask[..., :tokens])
    return bias.unflatten(1, (heads, -1)) if bias.shape[1] > 1 else bias.unsqueeze(2)


def product(query: Tensor, keys: Tensor, softcap: float | None) -> Tensor:
    """Return q·kᵀ of [B, H, G, lanes, d] and [B, H, n, d], in float32, capped."""
    logits = (query.flatten(2, 3) @ keys.float().transpose(2, 3)).unflatten(2, query.shape[2:4])
    return capped(logits, softcap)


@dataclass(frozen=True)
class Query:
    """A decode step's queries, in float32.

    query: [B, H, G, lanes, d], scaled.
    bias: the additive mask [B|1, H|1, G|1, lanes|1, n + 1], or None.
    sink: [H, G, 1, 1], or None.
    length: n, the number of cached tokens.
    low_bit: number of cached tokens in the low-bit tier.
    candidates: number of cached tokens in the low-bit tier after this step. With R = 0 it excludes the new token, whose
        pair has not reached the host.
    """

    query: Tensor
    bias: Tensor | None
    sink: Tensor | None
    softcap: float | None
    length: int
    low_bit: int
    candidates: int

    def logits(self, keys: Tensor, start: int, stop: int) -> Tensor:
        """Return the logits of keys [B, H, n, d] of tokens start..stop; new tokens may share one column of the mask."""
        logits = product(self.query, keys, self.softcap)
        return logits if self.bias is None else logits + self.bias[..., start:stop]

    def new_logits(self, k: Tensor) -> Tensor:
        """Return the logits of the new keys [B, H, lanes, d], causal between lanes."""
        logits = self.logits(k, self.length, self.length + 1)
        lanes = k.shape[2]
        return logits.masked_fill(torch.ones(lanes, lanes, dtype=torch.bool, device=k.device).triu(1), -math.inf)

    def hide(self, scores: Tensor, lanes: slice, sinks: Tensor) -> None:
        """Set scores [B, H, lanes, C] of candidates to -1 that are sinks, whose pairs are never fetched, or that the
        mask hides from every query head of a group."""
        scores = scores[..., : self.candidates]
        scores.masked_fill_(hidden_by(sinks, self.candidates).unsqueeze(2), -1.0)
        if self.bias is not None:
            seen = (self.bias[..., : self.candidates] > SEEN).any(2)
            scores.masked_fill_(~seen.expand(-1, -1, self.query.shape[3], -1)[:, :, lanes], -1.0)


def query_of(new: AttentionInputs, scale: float, softcap: float | None) -> Query:
    length, low_bit, next_low_bit = (max(0, int(new.cursor[0, i])) for i in (LENGTH, LOW_BIT, NEXT_LOW_BIT))
    heads = new.k.shape[1]
    return Query(
        new.q.float().unflatten(1, (heads, -1)) * scale,
        None if new.mask is None else grouped_bias(new.mask, heads, length + 1),
        None if new.sinks is None else new.sinks.float().view(heads, -1, 1, 1),
        softcap, length, low_bit, min(next_low_bit, length),
    )  # fmt: skip


def in_slots(slot_index: Tensor, low_bit: int) -> tuple[Tensor, Tensor]:
    """Return which slots (or sinks) hold a pair of the low-bit tier, bool [B, H, k], and their tokens, int64."""
    return (slot_index >= 0) & (slot_index < low_bit), slot_index.long().clamp(0, max(low_bit - 1, 0))


def hidden_by(slot_index: Tensor, low_bit: int) -> Tensor:
    """Return which tokens of the low-bit tier are in the slots (or are sinks), bool [B, H, low_bit]."""
    fetched, position = in_slots(slot_index, low_bit)
    hidden = torch.zeros(*fetched.shape[:2], low_bit, dtype=torch.int32, device=slot_index.device)
    if low_bit:
        hidden.scatter_add_(2, position, fetched.int())
    return hidden.bool()
