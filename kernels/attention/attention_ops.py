"""Definitions of a decode step's attention over the tiers.

They compute in float32 for all input dtypes. Token t of the cache is column t of every mask.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specache_compile.kernels.codes import trellis
from specache_compile.kernels.codes.params import read_scale
from specache_compile.kernels.codes.quantize import CHANNELS, TOKENS, dequantize
from specache_compile.kernels.codes.records import RECORD, in_thread_order, param_order, read_levels, stored_dim
from specache_compile.kernels.state.by_rows import by_rows
from specache_compile.kernels.state.center import share_of_center, tokens_of_one
from specache_compile.kernels.state.layout import Layout, StoredTiers, rotated
from specache_compile.kernels.state.operands import AttentionInputs, TierInputs, takes

from .kept_logits import whole_logits
from .query import Query, capped, hidden_by, in_slots, product, query_of

# Tokens per block: one head's float32 keys and values of a block fit in a core's L2 cache.
BLOCK = 1024


def low_bit_rows(tiers: StoredTiers, layout: Layout, head_dim: int, length: int, values: bool) -> Tensor:
    """Return the keys or values [B, H, length, d] of the low-bit tier's first tokens, in float32, rotated if stored so.

    length: whole groups.
    """
    codes, given = tiers.codes, tiers.value_params if values else tiers.key_params
    if not length:
        return codes.new_empty((*codes.shape[:2], 0, head_dim), dtype=torch.float32)
    if not layout.is_quantised:
        return codes[:, :, :length].unflatten(3, (2, head_dim))[..., int(values), :].float()
    dim, bits = stored_dim(head_dim), layout.value_bits if values else layout.key_bits
    whole = codes[:, :, : -(-length // RECORD) * RECORD]
    params = given[:, :, : length * given.shape[2] // codes.shape[2]]
    if trellis.is_trellis(params):
        levels, scale = trellis.read_levels(whole, dim, values), read_scale(params).flatten(2)
        scale = in_thread_order(scale) if values else scale
        return trellis.dequantize(levels[:, :, :length, :head_dim], scale)
    if not values:
        params = params[..., param_order(dim, bits).argsort().to(params.device)]
    levels = read_levels(whole, dim, bits, values)[:, :, :length]
    return dequantize(levels, params, CHANNELS if values else TOKENS)[..., :head_dim]


def ring_tokens(recent: Tensor, start: int, stop: int) -> Tensor:
    """Return the recent tier's pairs [B, H, stop - start, 2, d] of tokens start..stop; token t is at t mod W."""
    return recent.index_select(2, torch.arange(start, stop, device=recent.device) % recent.shape[2])


def low_bit_logits(at: Query, tiers: StoredTiers, layout: Layout) -> Tensor:
    """Return the logits [B, H, G, lanes, n] of the n tokens of the low-bit tier; -inf for sinks."""
    length = at.low_bit
    query = rotated(at.query) if layout.is_rotated else at.query
    logits = product(query, low_bit_rows(tiers, layout, query.shape[-1], length, values=False), None)
    if tiers.center.shape[2]:
        group = tiers.codes.shape[2] // tiers.key_params.shape[2]
        shares = share_of_center(at.query, tiers.center, group, length)
        logits = logits + shares.repeat_interleave(tokens_of_one(tiers.center.shape[2], group), -1)
    logits = capped(logits, at.softcap)
    logits = logits if at.bias is None else logits + at.bias[..., :length]
    return without(logits, sinks_of(tiers))


def without(logits: Tensor, index: Tensor) -> Tensor:
    """Return the low-bit tier's logits [B, H, G, lanes, n] with -inf for the tokens `index` [B, H, k]."""
    return logits.masked_fill(hidden_by(index, logits.shape[-1])[:, :, None, None], -math.inf)


def sinks_of(tiers: StoredTiers) -> Tensor:
    """Return the sink tokens of each head in the form of slot_index, int32 [B, H, S]."""
    return tiers.sink_index.expand(-1, tiers.codes.shape[1], -1)


def weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Return Σ w·v of weights [B, H, G, lanes, n] and values [B, H, n, d]."""
    return (weights.flatten(2, 3) @ values.float()).unflatten(2, weights.shape[2:4])


def softmax(logits: Tensor) -> Tensor:
    """Return the softmax over the last dimension; 0 for a fully masked row."""
    return logits.softmax(-1).masked_fill_(logits.amax(-1, keepdim=True) == -math.inf, 0.0)


def weights_of(logits: list[Tensor], sinks: Tensor | None) -> list[Tensor]:
    """Return the weights of each part's logits [..., n], in one softmax over all parts and the sinks [H, G, 1, 1]."""
    parts = logits if sinks is None else [*logits, sinks.expand(*logits[0].shape[:-1], 1)]
    weights = softmax(torch.cat(parts, -1)).split([part.shape[-1] for part in parts], -1)
    return list(weights[: len(logits)])


def attended(
    at: Query, k: Tensor, v: Tensor, logits: Tensor, fetched: tuple[Tensor, Tensor], tiers: StoredTiers,
    layout: Layout, skip_below: float,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Attend over all tiers, given the low-bit tier's logits.

    logits: [B, H, G, lanes, n]; -inf for tokens whose 16-bit pairs are in the slots.
    fetched: logits and values of the slots, as `picked` returns them.

    Returns: the output [B, Hq, lanes, d] in float32, and the last lane's weights [B, H, n], summed over the query
    group, of low-bit tier, slots and window.
    """
    keys, values = ring_tokens(tiers.recent, at.low_bit, at.length).unbind(-2)
    window = at.logits(keys, at.low_bit, at.length), values
    exact = [fetched, window, (at.new_logits(k), v), picked(at, tiers.sink_pairs, sinks_of(tiers))]
    others = [part for part, _ in exact]
    weights = weights_of([logits, *others], at.sink)
    scores = [part[..., -1, :].sum(2) for part in weights[:3]]
    if skip_below:
        skipped = negligible(weights[0], skip_below)[:, :, None, None]
        weights = weights_of([logits.masked_fill(skipped, -math.inf), *others], at.sink)
    out = torch.stack([weighted(each, pairs[1]) for each, pairs in zip(weights[1:], exact, strict=True)]).sum(0)
    packed = weighted(weights[0], low_bit_rows(tiers, layout, k.shape[-1], at.low_bit, values=True))
    out = out + (rotated(packed) if layout.is_rotated else packed)
    return out.flatten(1, 2), scores


def picked(at: Query, pairs: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits [B, H, G, lanes, n] and values of pairs [B, H, n, 2, d], the low-bit tier's tokens `index`.

    Values of empty slots are 0: they are undefined, and a weight of 0 does not remove values that are not finite.
    """
    there, position = in_slots(index, at.low_bit)
    logits = product(at.query, pairs[..., 0, :], at.softcap)
    if at.bias is not None:
        where = position[:, :, None, None].expand(*at.query.shape[:-1], -1)
        logits = logits + at.bias.expand(*at.query.shape[:-1], -1).gather(-1, where)
    logits = logits.masked_fill(~there[:, :, None, None], -math.inf)
    return logits, pairs[..., 1, :].masked_fill(~there.unsqueeze(-1), 0.0)


def negligible(weights: Tensor, skip_below: float) -> Tensor:
    """Return the low-bit tokens whose values may be skipped, bool [B, H, n], by their weights [B, H, G, lanes, n].

    A record of 64 tokens is skipped if each of its weights, in every query row of the KV head, is below `skip_below`.
    Less than n · skip_below of the attention is then missing, and the output's error is below twice that share of the
    largest value.
    """
    largest = weights.amax((2, 3))
    tokens = largest.shape[-1]
    records = torch.nn.functional.pad(largest, (0, -tokens % RECORD)).unflatten(-1, (-1, RECORD)).amax(-1)
    return (records < skip_below).repeat_interleave(RECORD, -1)[..., :tokens]


@by_rows(0, 0)
@takes(new=AttentionInputs, read=TierInputs)
def decode_attention(
    new: AttentionInputs, slots: Tensor, slot_index: Tensor, read: TierInputs, skip_below: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Attend over the low-bit cache C', in which 16-bit pairs replace the rows K_t (SpeCache equation 1).

    Args:
        new: T lanes; in the mask, column n is every new token.
        slots, slot_index: [B, H, k, 2, d] and int32 [B, H, k] (-1: empty).
        skip_below: the attention weight of `negligible`; 0 skips nothing. Scores do not depend on it.

    Returns: the output [B, Hq, lanes, d] in q's dtype, and float32 scores [B, H, C]. Scores are the last lane's
    attention, summed over the query group, to cached tokens that are in the low-bit tier after this step. Elsewhere,
    and without slots, they are -1.
    """
    held, how = read.tiers, read.layout
    at = query_of(new, read.scale, read.softcap)
    logits = without(low_bit_logits(at, held, how), slot_index)
    fetched = picked(at, slots, slot_index)
    out, (packed, exact, window) = attended(at, new.k, new.v, logits, fetched, held, how, skip_below)
    scores = torch.full(held.codes.shape[:3], -1.0, dtype=torch.float32, device=out.device)
    if slots.shape[2]:
        if at.low_bit:
            scores[:, :, : at.low_bit] = packed.scatter_add_(-1, in_slots(slot_index, at.low_bit)[1], exact)
        scores[:, :, at.low_bit : at.candidates] = window[..., : at.candidates - at.low_bit]
        at.hide(scores.unsqueeze(2), slice(-1, None), sinks_of(held))
    return out.to(new.q.dtype).contiguous(), scores


@by_rows(0, 0, 1)
@takes(new=AttentionInputs, read=TierInputs)
def score_low_bit(new: AttentionInputs, read: TierInputs, scores: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the first half of a corrected decode attention: each lane's scores, independent of the slots.

    Args: as in `decode_attention`, where v is not read, and
        scores: False if only `correct` reads them. A GPU then returns none, since `correct` selects by kept logits.

    Returns: the low-bit tier's logits [B, Hq, lanes, C], undefined after its last token, and their base
    (`kept_logits.py`), empty here; and float32 scores [lanes, B, H, C]. Scores are each lane's attention, over low-bit
    tier, window and new pairs and summed over the query group, to the tokens that are in the low-bit tier after this
    step. Elsewhere they are -1.
    """
    held = read.tiers
    at = query_of(new, read.scale, read.softcap)
    packed = low_bit_logits(at, held, read.layout)
    keys = ring_tokens(held.recent, at.low_bit, at.length)[..., 0, :]
    window = at.logits(keys, at.low_bit, at.length)
    sinks_apart, _ = picked(at, held.sink_pairs, sinks_of(held))
    weights = weights_of([packed, window, at.new_logits(new.k), sinks_apart], at.sink)
    found = torch.full((new.q.shape[2], *held.codes.shape[:3]), -1.0, dtype=torch.float32, device=new.q.device)
    by_lane = found.permute(1, 2, 0, 3)
    by_lane[..., : at.candidates] = torch.cat(weights[:2], -1)[..., : at.candidates].sum(2)
    at.hide(by_lane, slice(None), sinks_of(held))
    logits, base = whole_logits(new.q, held.codes.shape[2])
    logits[..., : at.low_bit] = packed.flatten(1, 2)
    logits[..., at.low_bit :] = -math.inf
    return logits, base, found


@by_rows(0)
@takes(new=AttentionInputs, read=TierInputs)
def attend_scored(
    new: AttentionInputs, logits: Tensor, base: Tensor, chosen: Tensor, slots: Tensor, slot_index: Tensor,
    read: TierInputs, skip_below: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute the second half of a corrected decode attention, from the logits of `score_low_bit`.

    Args: as in `decode_attention`, and
        logits, base: results of `score_low_bit`; a GPU sets the logits of `chosen` to -inf.
        chosen: int32 [B, H, k], the result of `correct`: the tokens of slot_index in another order, available before
            their pairs.

    Returns: the output of `decode_attention`, [B, Hq, lanes, d].
    """
    at = query_of(new, read.scale, read.softcap)
    packed = without(logits[..., : at.low_bit].unflatten(1, (new.k.shape[1], -1)), chosen)
    fetched = picked(at, slots, slot_index)
    out, _ = attended(at, new.k, new.v, packed, fetched, read.tiers, read.layout, skip_below)
    return out.to(new.q.dtype).contiguous()
