"""Definitions of attention over the tiers: a decode step's lanes, and the exact attention of a chunked prefill.

Both compute in float32 for all input dtypes. Token t of the cache is column t of every mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specache_compile.kernels.codes import trellis
from specache_compile.kernels.codes.params import read_scale
from specache_compile.kernels.codes.quantize import dequantize_keys, dequantize_values
from specache_compile.kernels.codes.records import (
    RECORD,
    in_thread_order,
    param_order,
    read_levels,
    stored_dim,
)
from specache_compile.kernels.movement.copy_queue import wait_for_offloads
from specache_compile.kernels.state.by_rows import by_rows
from specache_compile.kernels.state.by_token import tokens_of
from specache_compile.kernels.state.center import share_of_center
from specache_compile.kernels.state.cursor import LENGTH, LOW_BIT, NEXT_LOW_BIT, length_of
from specache_compile.kernels.state.layout import Layout, rotated
from specache_compile.kernels.state.stored_pairs import decoded
from specache_compile.kernels.state.stored_tiers import StoredTiers

from .kept_logits import whole_logits

# Tokens per block: one head's float32 keys and values of a block fit in a core's L2 cache.
BLOCK = 1024
# An additive mask hides a token with its dtype's minimum; float16's minimum is the closest to 0.
SEEN = torch.finfo(torch.float16).min / 2
NO_LOGITS = torch.empty(0, device="cpu")


def low_bit_keys(tiers: StoredTiers, layout: Layout, head_dim: int, start: int, stop: int) -> Tensor:
    """Return the low-bit tier's keys [B, H, stop - start, d] of tokens start..stop, in float32, rotated if stored so.

    `start` must be a multiple of the group size and of a record.
    """
    codes, params = tiers.codes, tiers.key_params
    if not layout.is_quantised:
        return codes[:, :, start:stop, :head_dim].float()
    dim, group = stored_dim(head_dim), codes.shape[2] // params.shape[2]
    whole = codes[:, :, start : rounded_up(stop, RECORD)]
    params = params[:, :, start // group : -(-stop // group)]
    if trellis.is_trellis(params):
        levels = trellis.read_levels(whole, dim, values=False)[:, :, : stop - start, :head_dim]
        return trellis.dequantize(levels, read_scale(params).reshape(*levels.shape[:3], 1, 1))
    levels = read_levels(whole, dim, layout.key_bits, values=False)[:, :, : stop - start]
    params = params[..., param_order(dim, layout.key_bits).argsort().to(params.device)]
    return dequantize_keys(levels, params)[..., :head_dim]


def low_bit_values(tiers: StoredTiers, layout: Layout, head_dim: int, start: int, stop: int) -> Tensor:
    """Return values, as `low_bit_keys` returns keys."""
    if not layout.is_quantised:
        return tiers.codes[:, :, start:stop, head_dim:].float()
    dim, params = stored_dim(head_dim), tiers.value_params[:, :, start:stop]
    whole = tiers.codes[:, :, start : rounded_up(stop, RECORD)]
    if trellis.is_trellis(params):
        levels = trellis.read_levels(whole, dim, values=True)[:, :, : stop - start, :head_dim]
        return trellis.dequantize(levels, in_thread_order(read_scale(params[..., 0, 0]))[..., None, None])
    levels = read_levels(whole, dim, layout.value_bits, values=True)[:, :, : stop - start]
    return dequantize_values(levels, params)[..., :head_dim]


def rounded_up(tokens: int, size: int) -> int:
    return -(-tokens // size) * size


def ring_tokens(recent: Tensor, start: int, stop: int) -> Tensor:
    """Return the recent tier's pairs [B, H, stop - start, 2, d] of tokens start..stop; token t is at t mod W."""
    return recent.index_select(2, torch.arange(start, stop, device=recent.device) % recent.shape[2])


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def check_covers(mask: Tensor, tokens: int) -> None:
    """Raise ValueError if a mask has fewer columns than tokens."""
    if mask.shape[-1] < tokens:
        raise ValueError(
            f"the attention mask covers {mask.shape[-1]} tokens, but the cache and the new ones are {tokens}"
        )


def grouped_bias(mask: Tensor, heads: int, tokens: int) -> Tensor:
    """Return a mask [B|1, Hq|1, Q|1, n] as an additive float32 bias [B|1, H|1, Hq/H|1, Q|1, n]."""
    bias = (
        torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else mask
    )
    check_covers(mask, tokens)
    bias = bias[..., :tokens].float()
    return bias.unflatten(1, (heads, -1)) if bias.shape[1] > 1 else bias.unsqueeze(2)


@dataclass(frozen=True)
class Partial:
    """Attention over a subset of the tokens. An empty or fully masked row has peak -inf and total 0.

    out: Σ exp(l - peak)·v, [B, H, G, lanes, d].
    peak: largest logit of each row, [B, H, G, lanes, 1].
    total: Σ exp(l - peak), [B, H, G, lanes, 1].
    logits: l, [B, H, G, lanes, n]; empty after a merge.
    """

    out: Tensor
    peak: Tensor
    total: Tensor
    logits: Tensor = NO_LOGITS


def partial_attention(logits: Tensor, values: Tensor) -> Partial:
    """Return `Partial` of one tier from its logits and its values [B, H, n, d]."""
    if not logits.shape[-1]:
        rows = logits.new_zeros((*logits.shape[:-1], 1))
        return Partial(rows.expand(*rows.shape[:-1], values.shape[-1]), rows - math.inf, rows, logits)
    peak = logits.amax(-1, keepdim=True)
    weights = (logits - peak.masked_fill(peak == -math.inf, 0.0)).exp()
    out = (weights.flatten(2, 3) @ values.float()).unflatten(2, logits.shape[2:4])
    return Partial(out, peak, weights.sum(-1, keepdim=True), logits)


def low_bit_logits(at: Query, tiers: StoredTiers, layout: Layout) -> Tensor:
    """Return the logits [B, H, G, lanes, n] of the n tokens of the low-bit tier, computed by blocks to save memory."""
    bias, length = at.low_bit_bias, at.low_bit
    shares = None
    if tiers.center.shape[2]:
        shares = share_of_center(at.query, tiers.center, tiers.codes.shape[2] // tiers.key_params.shape[2], length)
    query = rotated(at.query) if layout.is_rotated else at.query
    blocks = [query.new_empty((*query.shape[:4], 0))]
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        keys = low_bit_keys(tiers, layout, query.shape[-1], start, stop)
        logits = product(query, keys, None)
        logits = capped(logits if shares is None else logits + shares[..., start:stop], at.softcap)
        blocks.append(logits if bias is None else logits + bias[..., start:stop])
    logits = torch.cat(blocks, -1)
    return logits.masked_fill(hidden_by(sinks_of(tiers), length)[:, :, None, None], -math.inf)


def sinks_of(tiers: StoredTiers) -> Tensor:
    """Return the sink tokens of each head in the form of slot_index, int32 [B, H, S]."""
    return tiers.sink_index.expand(-1, tiers.codes.shape[1], -1)


def low_bit_mix(logits: Tensor, hidden: Tensor, tiers: StoredTiers, d: int, layout: Layout) -> Partial:
    """Return `Partial` of the low-bit tier from its logits [B, H, G, lanes, n], computed by blocks.

    hidden: bool [B, H, n], True for excluded tokens, whose 16-bit pairs are in the slots.
    """
    length = logits.shape[-1]
    if not length:
        return partial_attention(logits, logits.new_empty((*logits.shape[:2], 0, d)))
    logits = logits.masked_fill(hidden[:, :, None, None], -math.inf)
    parts = []
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        values = low_bit_values(tiers, layout, d, start, stop)
        parts.append(partial_attention(logits[..., start:stop], values))
    out, peak, total = merge(parts, None)
    return Partial(rotated(out) if layout.is_rotated else out, peak, total, logits)


def product(query: Tensor, keys: Tensor, softcap: float | None) -> Tensor:
    """Return q·kᵀ of [B, H, G, lanes, d] and [B, H, n, d], in float32, capped."""
    logits = (query.flatten(2, 3) @ keys.float().transpose(2, 3)).unflatten(2, query.shape[2:4])
    return capped(logits, softcap)


def merge(parts: list[Partial], sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Merge parts by log-sum-exp; returns out, peak and total, in which the sinks [H, G, 1, 1] count."""
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


def reciprocal(total: Tensor) -> Tensor:
    """Return 1/total, or 0 for a fully masked row."""
    return total.reciprocal().masked_fill(total == 0, 0.0)


def softmax_denominator(logits: list[Tensor], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return row maximum and 1/denominator [..., 1] over all tiers' logits and the sink; 0 for a fully masked row."""
    parts = [partial_attention(part, part.new_empty((*part.shape[:2], part.shape[-1], 0))) for part in logits]
    _, peak, total = merge(parts, sinks)
    return peak.masked_fill(peak == -math.inf, 0.0), reciprocal(total)


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

    @property
    def low_bit_bias(self) -> Tensor | None:
        return None if self.bias is None else self.bias[..., : self.low_bit]

    def logits(self, keys: Tensor, start: int, stop: int) -> Tensor:
        """Return the logits of keys [B, H, n, d] of tokens start..stop; new tokens may share one column of the mask."""
        logits = product(self.query, keys, self.softcap)
        return logits if self.bias is None else logits + self.bias[..., start:stop]

    def new_logits(self, k: Tensor) -> Tensor:
        """Return the logits of the new keys [B, H, lanes, d], causal between lanes."""
        logits = self.logits(k, self.length, self.length + 1)
        lanes = k.shape[2]
        return logits.masked_fill(torch.ones(lanes, lanes, dtype=torch.bool, device=k.device).triu(1), -math.inf)

    def hide_unseen(self, scores: Tensor, lanes: slice) -> None:
        """Set scores [B, H, lanes, C] to -1 for candidates that the mask hides from every query head of a group."""
        if self.bias is not None:
            seen = (self.bias[..., : self.candidates] > SEEN).any(2)
            seen = seen.expand(-1, -1, self.query.shape[3], -1)[:, :, lanes]
            scores[..., : self.candidates].masked_fill_(~seen, -1.0)


def query_of(
    q: Tensor, k: Tensor, mask: Tensor | None, sinks: Tensor | None, cursor: Tensor, scale: float,
    softcap: float | None,
) -> Query:  # fmt: skip
    length, low_bit, next_low_bit = (max(0, int(cursor[0, i])) for i in (LENGTH, LOW_BIT, NEXT_LOW_BIT))
    heads = k.shape[1]
    return Query(
        q.float().unflatten(1, (heads, -1)) * scale,
        None if mask is None else grouped_bias(mask, heads, length + 1),
        None if sinks is None else sinks.float().view(heads, -1, 1, 1),
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


@dataclass(frozen=True)
class Attended:
    """Attention over all tiers.

    parts: low-bit tier, slots, recent tier, new pairs, sinks.
    out, peak, total: the merged parts (`merge`).
    slot_tokens: the token in each slot, int64 [B, H, k].
    """

    parts: list[Partial]
    out: Tensor
    peak: Tensor
    total: Tensor
    slot_tokens: Tensor

    @property
    def share(self) -> Tensor:
        return reciprocal(self.total)

    def output(self, dtype: torch.dtype) -> Tensor:
        """Return the output [B, Hq, lanes, d]."""
        return (self.out * self.share).flatten(1, 2).to(dtype).contiguous()

    def last_lane(self, part: Partial) -> Tensor:
        """Return the last lane's attention [B, H, n] to the tokens of a part, summed over the query group."""
        base = self.peak.masked_fill(self.peak == -math.inf, 0.0)
        return ((part.logits[..., -1, :] - base[..., -1, :]).exp_() * self.share[..., -1, :]).sum(2)


def attend_over(
    at: Query, k: Tensor, v: Tensor, logits: Tensor, hidden: Tensor, slots: Tensor, slot_index: Tensor,
    tiers: StoredTiers, layout: Layout,
) -> Attended:  # fmt: skip
    """Return `Attended` from the low-bit tier's logits; hidden as in `low_bit_mix`."""
    packed = low_bit_mix(logits, hidden, tiers, k.shape[-1], layout)
    keys, values = ring_tokens(tiers.recent, at.low_bit, at.length).unbind(-2)
    parts = [
        packed,
        picked_attention(at, slots, slot_index),
        partial_attention(at.logits(keys, at.low_bit, at.length), values),
        partial_attention(at.new_logits(k), v),
        picked_attention(at, tiers.sink_pairs, sinks_of(tiers)),
    ]
    return Attended(parts, *merge(parts, at.sink), in_slots(slot_index, at.low_bit)[1])


def picked_logits(at: Query, pairs: Tensor, index: Tensor) -> Tensor:
    """Return the logits [B, H, G, lanes, n] of pairs [B, H, n, 2, d], which hold the low-bit tier's tokens `index`."""
    fetched, position = in_slots(index, at.low_bit)
    logits = product(at.query, pairs[..., 0, :], at.softcap)
    if at.low_bit_bias is not None and at.low_bit:
        where = position[:, :, None, None].expand(*at.query.shape[:-1], -1)
        logits = logits + at.low_bit_bias.expand(*at.query.shape[:-1], -1).gather(-1, where)
    return logits.masked_fill(~fetched[:, :, None, None], -math.inf)


def picked_attention(at: Query, pairs: Tensor, index: Tensor) -> Partial:
    """Return `Partial` of the pairs in the slots, or of the sinks."""
    # Empty slots are uninitialised, and a weight of 0 does not remove values that are not finite.
    there = in_slots(index, at.low_bit)[0].unsqueeze(-1)
    return partial_attention(picked_logits(at, pairs, index), pairs[..., 1, :].masked_fill(~there, 0.0))


def hide_sinks(at: Query, scores: Tensor, tiers: StoredTiers) -> None:
    """Set scores [B, H, lanes, C] of sinks to -1, since their pairs are never fetched."""
    scores[..., : at.candidates].masked_fill_(hidden_by(sinks_of(tiers), at.candidates).unsqueeze(2), -1.0)


def negligible(done: Attended, skip_below: float) -> Tensor:
    """Return the low-bit tokens whose values may be skipped, bool [B, H, n].

    A record of 64 tokens is skipped if each of its weights, in every query row of the KV head, is below `skip_below`.
    Less than n · skip_below of the attention is then missing, and the output's error is below twice that share of the
    largest value.
    """
    weights = (done.parts[0].logits - done.peak.masked_fill(done.peak == -math.inf, 0.0)).exp() * done.share
    largest = weights.amax((2, 3))
    tokens = largest.shape[-1]
    records = torch.nn.functional.pad(largest, (0, -tokens % RECORD)).unflatten(-1, (-1, RECORD)).amax(-1)
    return (records < skip_below).repeat_interleave(RECORD, -1)[..., :tokens]


@by_rows(0, 0)
def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    cursor: Tensor,
    slots: Tensor,
    slot_index: Tensor,
    tiers: Sequence[Tensor],
    layout: Sequence[int],
    scale: float,
    softcap: float | None,
    skip_below: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attend over the low-bit cache C', in which 16-bit pairs replace the rows K_t (SpeCache equation 1).

    Args:
        q: [B, Hq, lanes, d].
        k, v: the new tokens' pairs [B, H, lanes, d], causal between lanes.
        mask: bool (True: visible) or additive [B|1, Hq|1, lanes|1, ≥ n + 1]; column n is the new token.
        sinks: [Hq].
        slots, slot_index: [B, H, k, 2, d] and int32 [B, H, k] (-1: empty).
        tiers, layout: the fields of `StoredTiers` and of `Layout`.
        skip_below: the attention weight of `negligible`; 0 skips nothing. Scores do not depend on it.

    Returns: the output [B, Hq, lanes, d] in q's dtype, and float32 scores [B, H, C]. Scores are the last lane's
    attention, summed over the query group, to cached tokens that are in the low-bit tier after this step. Elsewhere,
    and without slots, they are -1.
    """
    held = StoredTiers(*tiers)
    how = Layout(*layout)
    at = query_of(q, k, mask, sinks, cursor, scale, softcap)
    logits = low_bit_logits(at, held, how)
    hidden = hidden_by(slot_index, at.low_bit)
    done = kept = attend_over(at, k, v, logits, hidden, slots, slot_index, held, how)
    if skip_below and at.low_bit:
        hidden = hidden | negligible(done, skip_below)
        kept = attend_over(at, k, v, logits, hidden, slots, slot_index, held, how)
    scores = torch.full(held.codes.shape[:3], -1.0, dtype=torch.float32, device=q.device)
    if slots.shape[2]:
        packed, exact, window = map(done.last_lane, done.parts[:3])
        if at.low_bit:
            scores[:, :, : at.low_bit] = packed.scatter_add_(-1, done.slot_tokens, exact)
        scores[:, :, at.low_bit : at.candidates] = window[..., : at.candidates - at.low_bit]
        at.hide_unseen(scores.unsqueeze(2), slice(-1, None))
        hide_sinks(at, scores.unsqueeze(2), held)
    return kept.output(q.dtype), scores


@by_rows(0, 0, 1)
def score_low_bit(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    cursor: Tensor,
    tiers: Sequence[Tensor],
    layout: Sequence[int],
    scale: float,
    softcap: float | None,
    scores: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the first half of a corrected decode attention: each lane's scores, independent of the slots.

    Args: as in `decode_attention`, and
        scores: False if only `correct` reads them. A GPU then returns none, since `correct` selects by kept logits.

    Returns: the low-bit tier's logits [B, Hq, lanes, C], undefined after its last token, and their base
    (`kept_logits.py`), empty here; and float32 scores [lanes, B, H, C]. Scores are each lane's attention, over low-bit
    tier, window and new pairs and summed over the query group, to the tokens that are in the low-bit tier after this
    step. Elsewhere they are -1.
    """
    held = StoredTiers(*tiers)
    at = query_of(q, k, mask, sinks, cursor, scale, softcap)
    packed = low_bit_logits(at, held, Layout(*layout))
    keys = ring_tokens(held.recent, at.low_bit, at.length)[..., 0, :]
    window = at.logits(keys, at.low_bit, at.length)
    sinks_apart = picked_logits(at, held.sink_pairs, sinks_of(held))
    peak, share = softmax_denominator([packed, window, at.new_logits(k), sinks_apart], at.sink)
    found = torch.full((q.shape[2], *held.codes.shape[:3]), -1.0, dtype=torch.float32, device=q.device)
    known = torch.cat([packed, window], -1)[..., : at.candidates]
    by_lane = found.permute(1, 2, 0, 3)
    by_lane[..., : at.candidates] = ((known - peak).exp_() * share).sum(2)
    at.hide_unseen(by_lane, slice(None))
    hide_sinks(at, by_lane, held)
    logits, base = whole_logits(q, held.codes.shape[2])
    logits[..., : at.low_bit] = packed.flatten(1, 2)
    logits[..., at.low_bit :] = -math.inf
    return logits, base, found


@by_rows(0)
def attend_scored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    cursor: Tensor,
    logits: Tensor,
    base: Tensor,
    chosen: Tensor,
    slots: Tensor,
    slot_index: Tensor,
    tiers: Sequence[Tensor],
    layout: Sequence[int],
    scale: float,
    softcap: float | None,
    skip_below: float = 0.0,
) -> Tensor:
    """Compute the second half of a corrected decode attention, from the logits of `score_low_bit`.

    Args: as in `decode_attention`, and
        logits, base: results of `score_low_bit`; a GPU sets the logits of `chosen` to -inf.
        chosen: int32 [B, H, k], the result of `correct`: the tokens of slot_index in another order, available before
            their pairs.

    Returns: the output of `decode_attention`, [B, Hq, lanes, d].
    """
    at = query_of(q, k, mask, sinks, cursor, scale, softcap)
    packed = logits[..., : at.low_bit].unflatten(1, (k.shape[1], -1))
    hidden, held = hidden_by(chosen, at.low_bit), StoredTiers(*tiers)
    done = attend_over(at, k, v, packed, hidden, slots, slot_index, held, Layout(*layout))
    if skip_below and at.low_bit:
        hidden = hidden | negligible(done, skip_below)
        done = attend_over(at, k, v, packed, hidden, slots, slot_index, held, Layout(*layout))
    return done.output(q.dtype)


@by_rows(0)
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
    """Compute exact attention of T new tokens over the host tier, streamed in blocks, and over themselves.

    A running softmax keeps one block of logits at a time.

    Args:
        q: [B, Hq, T, d].
        k, v: [B, H, T, d].
        mask: [B|1, Hq|1, T, ≥ n + T], or one row of padding for all T. With one row or None, new tokens are causal.
        sinks: [Hq].
        host: all cached pairs (`by_token.py`), exact, rounded, or e4m3 codes.

    Returns: [B, Hq, T, d] in q's dtype.
    """
    wait_for_offloads(cursor)
    length = length_of(cursor)
    if length < 0:  # the padding fills whole chunks of the prompt
        there = [x[:, :, -length:] for x in (q, k, v)]
        out = extend_attention(there[0], there[1], there[2], mask, sinks, cursor.clamp_min(0), host, scale, softcap)
        return torch.nn.functional.pad(out, (0, 0, -length, 0))
    heads, tokens = k.shape[1], k.shape[2]
    query = q.float().unflatten(1, (heads, -1)) * scale
    sink = None if sinks is None else sinks.float().view(heads, -1, 1, 1)
    bias = None if mask is None else grouped_bias(mask, heads, length + tokens)

    parts: list[Partial] = []
    starts = range(0, length, BLOCK)
    for start in [*starts, length]:
        if start == length:
            stop, keys, values = length + tokens, k, v
        else:
            stop = min(start + BLOCK, length)
            pairs = decoded(tokens_of(host, start, stop).to(q.device), q.dtype, q.shape[-1])
            keys, values = pairs.float().unbind(-2)
        logits = product(query, keys, softcap)
        if bias is not None:
            logits = logits + bias[..., start:stop]
        if start == length and (bias is None or bias.shape[3] == 1):
            logits = logits.masked_fill(
                torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1), -math.inf
            )
        parts = [Partial(*merge([*parts, partial_attention(logits, values)], None))]
    out, _, total = merge(parts, sink)
    return (out * reciprocal(total)).flatten(1, 2).to(q.dtype).contiguous()
