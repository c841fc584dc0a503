"""Attention over the tiers: the decode step's two lanes, and the exact attention of an extend.

Both compute in float32 whatever the inputs' dtype. Token t of the cache is column t of every mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .copy_queue import wait_for_offloads
from .cursor import LENGTH, LOW_BIT, NEXT_LOW_BIT
from .quantize import dequantize_keys, dequantize_values

# Tokens per block: a block's float32 keys and values of one head stay in a core's second-level cache.
BLOCK = 1024
# An additive mask hides a token with its dtype's minimum, of which float16 has the smallest.
SEEN = torch.finfo(torch.float16).min / 2

LowBitPart = Callable[..., "Partial"]


def stored_bits(codes: Tensor, head_dim: int) -> int:
    """Bits of a low-bit tier, from the width of its codes [B, H, capacity, 2, width]; 16 means not quantised."""
    return codes.shape[-1] * 8 // head_dim if codes.dtype == torch.uint8 else 16


def low_bit_pairs(
    codes: Tensor, key_params: Tensor, value_params: Tensor, head_dim: int, start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, stop - start, d] in float32 of the low-bit tier's tokens start..stop.

    `start` must lie on a group's border.
    """
    bits = stored_bits(codes, head_dim)
    keys, values = codes[:, :, start:stop].unbind(3)
    if bits == 16:
        return keys.float(), values.float()
    group = codes.shape[2] // key_params.shape[2]
    key_block = key_params[:, :, start // group : -(-stop // group)]
    return dequantize_keys(keys, key_block, bits), dequantize_values(values, value_params[:, :, start:stop], bits)


def ring_tokens(recent: Tensor, start: int, stop: int) -> Tensor:
    """Pairs [B, H, stop - start, 2, d] of the recent tier's tokens start..stop; token t lies at t mod W."""
    return recent.index_select(2, torch.arange(start, stop, device=recent.device) % recent.shape[2])


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def grouped_bias(mask: Tensor, heads: int, tokens: int) -> Tensor:
    """A mask [B or 1, Hq or 1, Q or 1, n] as an additive float32 bias [B or 1, H or 1, Hq/H or 1, Q or 1, n]."""
    bias = (
        torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else mask
    )
    if bias.shape[-1] < tokens:
        raise ValueError(
            f"the attention mask covers {bias.shape[-1]} tokens, but the cache and the new ones are {tokens}"
        )
    bias = bias[..., :tokens].float()
    return bias.unflatten(1, (heads, -1)) if bias.shape[1] > 1 else bias.unsqueeze(2)


def softmax_denominator(logits: list[Tensor], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Row maximum and 1/denominator [..., 1] over all tiers' logits and the sink; a fully masked row gives 0."""
    peak = torch.stack(
        [part.amax(-1) if part.shape[-1] else part.new_full(part.shape[:-1], -math.inf) for part in logits]
    )
    peak = peak.amax(0).unsqueeze(-1)
    if sinks is not None:
        peak = torch.maximum(peak, sinks)
    peak = peak.masked_fill(peak == -math.inf, 0.0)
    total = torch.stack([(part - peak).exp().sum(-1, keepdim=True) for part in logits]).sum(0)
    if sinks is not None:
        total = total + (sinks - peak).exp()
    return peak, total.reciprocal().masked_fill(total == 0, 0.0)


@dataclass(frozen=True)
class Partial:
    """Attention over some of the tokens: logits [B, H, G, lanes, n], Σ exp(l - peak)·v [B, H, G, lanes, d], and the
    row maximum and Σ exp(l - peak) [B, H, G, lanes, 1]. An empty or fully masked row has peak -inf and total 0.
    """

    logits: Tensor
    out: Tensor
    peak: Tensor
    total: Tensor


def partial_attention(logits: Tensor, values: Tensor) -> Partial:
    """`Partial` of one tier from its logits and its values [B, H, n, d]."""
    if not logits.shape[-1]:
        rows = logits.new_zeros((*logits.shape[:-1], 1))
        return Partial(logits, rows.expand(*rows.shape[:-1], values.shape[-1]), rows - math.inf, rows)
    peak = logits.amax(-1, keepdim=True)
    weights = (logits - peak.masked_fill(peak == -math.inf, 0.0)).exp()
    out = (weights.flatten(2, 3) @ values.float()).unflatten(2, logits.shape[2:4])
    return Partial(logits, out, peak, weights.sum(-1, keepdim=True))


def low_bit_attention(
    query: Tensor, codes: Tensor, key_params: Tensor, value_params: Tensor, hidden: Tensor, bias: Tensor | None,
    length: int, softcap: float | None,
) -> Partial:  # fmt: skip
    """Attention of the scaled query [B, H, G, lanes, d] over the low-bit tier's first `length` tokens.

    hidden bool [B, H, length]: tokens whose 16-bit pair is in the slots. The reference; block by block, so that the
    unpacked keys and values never stand whole in memory.
    """
    parts = []
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        keys, values = low_bit_pairs(codes, key_params, value_params, query.shape[-1], start, stop)
        logits = product(query, keys, softcap)
        if bias is not None:
            logits = logits + bias[..., start:stop]
        logits = logits.masked_fill(hidden[:, :, None, None, start:stop], -math.inf)
        parts.append(partial_attention(logits, values))
    if not parts:
        return partial_attention(query[..., :0], query.new_empty((*codes.shape[:2], 0, query.shape[-1])))
    merged = merge(parts, None)
    return Partial(torch.cat([part.logits for part in parts], -1), *merged)


def product(query: Tensor, keys: Tensor, softcap: float | None) -> Tensor:
    """q·kᵀ of [B, H, G, lanes, d] and [B, H, n, d], in float32, capped."""
    logits = (query.flatten(2, 3) @ keys.float().transpose(2, 3)).unflatten(2, query.shape[2:4])
    return capped(logits, softcap)


def merge(parts: list[Partial], sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """out, peak and total over all parts, the sinks [H, G, 1, 1] among the totals: log-sum-exp, part by part."""
    peak = torch.stack([part.peak for part in parts]).amax(0)
    if sinks is not None:
        peak = torch.maximum(peak, sinks)
    base = peak.masked_fill(peak == -math.inf, 0.0)
    shrinks = [(part.peak - base).exp() for part in parts]
    total = sum((part.total * shrink for part, shrink in zip(parts, shrinks, strict=True)), torch.zeros_like(peak))
    if sinks is not None:
        total = total + (sinks - base).exp()
    out = sum((part.out * shrink for part, shrink in zip(parts, shrinks, strict=True)), torch.zeros_like(parts[0].out))
    return out, peak, total


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    cursor: Tensor,
    codes: Tensor,
    key_params: Tensor,
    value_params: Tensor,
    recent: Tensor,
    slots: Tensor,
    slot_index: Tensor,
    scale: float,
    softcap: float | None,
    low_bit_part: LowBitPart = low_bit_attention,
) -> tuple[Tensor, Tensor]:
    """Attention of the lanes over C' with the rows K_t replaced by their 16-bit pairs (SpeCache equation 1).

    q [B, Hq, lanes, d]; k, v [B, H, lanes, d] of the new tokens, causal between lanes; mask bool (True: seen) or
    additive, [B|1, Hq|1, lanes|1, ≥ n + 1], column n the new token; sinks [Hq]. Tiers: codes [B, H, C, 2, w],
    key_params [B, H, C/g, 2, d], value_params [B, H, C, 2, d/gv], recent [B, H, W, 2, d], slots [B, H, k, 2, d],
    slot_index [B, H, k] (-1: empty). `low_bit_part` computes the low-bit tier's share.

    Returns the output [B, Hq, lanes, d] in q's dtype, and the last lane's attention [B, H, C] in float32, summed
    over the query group, for the cached tokens that will be in the low-bit tier after this step; -1 elsewhere, and
    everywhere where there are no slots to select for.
    """
    length, low_bit, next_low_bit = (int(cursor[i]) for i in (LENGTH, LOW_BIT, NEXT_LOW_BIT))
    candidates = min(next_low_bit, length)  # with R = 0 the new token is to be low-bit, but is not on the host yet
    heads, lanes = k.shape[1:3]
    query = q.float().unflatten(1, (heads, -1)) * scale  # [B, H, G, lanes, d]
    bias = None if mask is None else grouped_bias(mask, heads, length + 1)
    sink = None if sinks is None else sinks.float().view(heads, -1, 1, 1)

    fetched = (slot_index >= 0) & (slot_index < low_bit)
    position = slot_index.long().clamp(0, max(low_bit - 1, 0))
    hidden = torch.zeros(*fetched.shape[:2], low_bit, dtype=torch.int32, device=q.device)
    if low_bit:
        hidden.scatter_add_(2, position, fetched.int())
    packed = low_bit_part(query, codes, key_params, value_params, hidden.bool(), bias, low_bit, softcap)

    in_slots = product(query, slots[:, :, :, 0], softcap)
    window = ring_tokens(recent, low_bit, length)
    in_window = product(query, window[:, :, :, 0], softcap)
    new = product(query, k, softcap)
    where = position[:, :, None, None].expand(*query.shape[:-1], -1)
    if bias is not None:
        if low_bit:
            in_slots = in_slots + bias[..., :low_bit].expand(*query.shape[:-1], -1).gather(-1, where)
        in_window = in_window + bias[..., low_bit:length]
        new = new + bias[..., length : length + 1]
    in_slots = in_slots.masked_fill(~fetched[:, :, None, None], -math.inf)
    new = new.masked_fill(torch.ones(lanes, lanes, dtype=torch.bool, device=q.device).triu(1), -math.inf)

    parts = [
        packed,
        # An empty place holds anything, and zero weight does not hide what is not finite.
        partial_attention(in_slots, slots[:, :, :, 1].masked_fill(~fetched.unsqueeze(-1), 0.0)),
        partial_attention(in_window, window[:, :, :, 1]),
        partial_attention(new, v),
    ]
    out, peak, total = merge(parts, sink)
    share = total.reciprocal().masked_fill(total == 0, 0.0)

    def attention_of_last_lane(logits: Tensor) -> Tensor:
        base = peak[:, :, :, -1].masked_fill(peak[:, :, :, -1] == -math.inf, 0.0)
        return ((logits[:, :, :, -1] - base).exp_() * share[:, :, :, -1]).sum(2)

    scores = torch.full(codes.shape[:3], -1.0, device=q.device)
    if not slots.shape[2]:
        return (out * share).flatten(1, 2).to(q.dtype).contiguous(), scores
    if low_bit:
        whole = attention_of_last_lane(packed.logits)
        whole.scatter_add_(-1, position, attention_of_last_lane(in_slots))
        scores[:, :, :low_bit] = whole
    scores[:, :, low_bit:candidates] = attention_of_last_lane(in_window[..., : candidates - low_bit])
    if bias is not None:
        seen = (bias[..., -1, :candidates] > SEEN).any(2)
        scores[:, :, :candidates].masked_fill_(~seen, -1.0)
    return (out * share).flatten(1, 2).to(q.dtype).contiguous(), scores


def extend_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    cursor: Tensor,
    host: Tensor,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Exact attention of T new tokens over the host tier, streamed in blocks, and over themselves.

    q [B, Hq, T, d]; k, v [B, H, T, d]; mask [B|1, Hq|1, T, ≥ n + T], or one row for all T, of padding, beside which the
    new tokens are causal, as they are without a mask; sinks [Hq]; host [B, H, C, 2, d]. Returns [B, Hq, T, d] in q's
    dtype. A running softmax keeps one block of logits at a time.
    """
    wait_for_offloads(cursor)
    length = int(cursor[LENGTH])
    heads, tokens = k.shape[1], k.shape[2]
    query = q.float().unflatten(1, (heads, -1)) * scale
    sink = None if sinks is None else sinks.float().view(heads, -1, 1, 1)
    bias = None if mask is None else grouped_bias(mask, heads, length + tokens)

    peak = query.new_full((*query.shape[:-1], 1), -math.inf) if sink is None else sink.expand(*query.shape[:-1], 1)
    total = torch.zeros_like(peak) if sink is None else torch.ones_like(peak)
    out = torch.zeros_like(query)
    starts = range(0, length, BLOCK)
    for start in [*starts, length]:
        if start == length:
            stop, keys, values = length + tokens, k, v
        else:
            stop = min(start + BLOCK, length)
            keys, values = host[:, :, start:stop].to(q.device).unbind(3)
        logits = product(query, keys, softcap)
        if bias is not None:
            logits = logits + bias[..., start:stop]
        if start == length and (bias is None or bias.shape[3] == 1):
            logits = logits.masked_fill(
                torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1), -math.inf
            )
        higher = torch.maximum(peak, logits.amax(-1, keepdim=True))
        base = higher.masked_fill(higher == -math.inf, 0.0)
        weights = (logits - base).exp()
        shrink = (peak - base).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + (weights.flatten(2, 3) @ values.float()).unflatten(2, (-1, tokens))
        peak = higher
    out = out / total.masked_fill(total == 0, 1.0)
    return out.flatten(1, 2).to(q.dtype).contiguous()
