"""Definitions of the ops that move pairs between tiers. All work in place on state tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specache_compile.kernels.attention.attention_ops import ring_tokens
from specache_compile.kernels.codes import trellis
from specache_compile.kernels.codes.params import stored_scale
from specache_compile.kernels.codes.quantize import CHANNELS, TOKENS, quantize
from specache_compile.kernels.codes.records import in_thread_order, param_order, stored_dim, write_levels, write_records
from specache_compile.kernels.state.by_rows import by_rows
from specache_compile.kernels.state.center import centers, is_found, set_center
from specache_compile.kernels.state.cursor import LENGTH, LOW_BIT, NEXT_LOW_BIT, length_of
from specache_compile.kernels.state.layout import EMPTY, Layout, StoredTiers, rotated
from specache_compile.kernels.state.operands import takes
from specache_compile.kernels.state.page_table import Pages, pairs_at, pairs_of, put
from specache_compile.kernels.state.sinks import keep_sinks
from specache_compile.kernels.state.stored_pairs import decoded, stored


@by_rows()
@takes(tiers=StoredTiers, layout=Layout)
def append(
    k: Tensor, v: Tensor, padding: Tensor | None, cursor: Tensor, tiers: StoredTiers, layout: Layout, zero_point: str,
    frequencies: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the new pairs to `recent`; pairs that leave the window move to the low-bit tier.

    Args:
        k, v: [B, H, T, d].
        padding: bool [B, 1, 1, C], False for padding tokens, which do not count in their group's range; or None.
        tiers: mutated, except `sink_index`.
        zero_point: name of a quantiser.
        frequencies: RoPE's [h], from which the keys' center is found. With None the center stays, or is the plain mean.
    """
    codes, key_params, _, center, _, _, recent = tiers
    length, low_bit, next_low_bit = (int(cursor[0, i]) for i in (LENGTH, LOW_BIT, NEXT_LOW_BIT))
    new = torch.stack([k, v], dim=3)[:, :, max(0, -length) :]
    length = max(0, length)
    if next_low_bit > low_bit:
        window = torch.cat([ring_tokens(recent, low_bit, length), new], dim=2)
        leaving = window[:, :, : next_low_bit - low_bit]
        if not low_bit and is_found(center, frequencies, trellis.is_trellis(key_params)):
            there = None if padding is None else padding[..., :next_low_bit].mT
            set_center(leaving[:, :, :, 0], there, frequencies, center, codes.shape[2] // key_params.shape[2])
        store_low_bit(leaving, padding, low_bit, tiers, layout, zero_point)
    first = max(length, next_low_bit)
    stop = length + new.shape[2]
    place = torch.arange(first, stop, device=recent.device) % recent.shape[2]
    recent.index_copy_(2, place, new[:, :, first - length :])


def store_low_bit(
    pairs: Tensor, padding: Tensor | None, start: int, tiers: StoredTiers, layout: Layout, zero_point: str
) -> None:
    """Quantise pairs [B, H, T, 2, d], T a multiple of g, into the low-bit tier from token `start` on.

    It also copies the pairs of sinks to `sink_pairs`. Centered or rotated pairs are rounded to the pairs' dtype before
    quantisation. padding: as in `append`.
    """
    stop = start + pairs.shape[2]
    codes, key_params, value_params, center = tiers[:4]
    if not layout.is_quantised:
        codes[:, :, start:stop] = pairs.flatten(3)
        return
    group = codes.shape[2] // key_params.shape[2]
    keys, values = pairs.unbind(-2)
    if center.shape[2]:
        keys = keys.float() - centers(center, group, start // group, stop // group)
    keys, values = ((rotated(x) if layout.is_rotated else x).to(pairs.dtype) for x in (keys, values))
    there = None if padding is None else padding[..., start:stop].mT
    sinks = keep_sinks(pairs, start, tiers.sink_pairs, tiers.sink_index)
    if trellis.is_trellis(key_params):
        scales = store_in_trellis(keys, start, codes, False)
        key_params[:, :, start // group : stop // group] = (
            stored_scale(scales, key_params.dtype).unflatten(2, (-1, group)).unsqueeze(3)
        )
    else:
        store_keys(keys, start, sinks, there, tiers, layout, zero_point)
    if trellis.is_trellis(value_params):
        scales = store_in_trellis(values, start, codes, True)
        value_params[:, :, start:stop, 0, 0] = in_thread_order(stored_scale(scales, value_params.dtype))
    else:
        values = padded(values)
        channels = values.shape[3] // value_params.shape[-1]
        levels, found = quantize(values, CHANNELS, channels, layout.value_bits, zero_point, value_params.dtype)
        write_levels(levels, start, codes, layout.value_bits, values=True)
        value_params[:, :, start:stop] = found


def store_in_trellis(x: Tensor, start: int, codes: Tensor, values: bool) -> Tensor:
    """Encode keys or values [B, H, T, d] in the trellis code; returns their scales float32 [B, H, T]."""
    dim, stop = stored_dim(x.shape[3]), start + x.shape[2]
    records, scale = trellis.quantize(x, start, dim, values)
    write_records(records, start, stop, codes, dim, 1, values)
    return scale


def store_keys(
    keys: Tensor, start: int, sinks: Tensor, there: Tensor | None, tiers: StoredTiers, layout: Layout, zero_point: str
) -> None:
    """Quantise keys [B, H, T, d] to the levels of their groups.

    Sinks, bool [B, n] for the first n tokens, and tokens that are not `there` [B, 1, T, 1] do not count in the ranges.
    """
    codes, params, bits = tiers.codes, tiers.key_params, layout.key_bits
    group = codes.shape[2] // params.shape[2]
    keys = padded(keys)
    order = param_order(keys.shape[3], bits).to(keys.device)
    # Tokens after the last sink take the fast path: a range with exceptions needs several passes.
    edge = -(-sinks.shape[1] // group) * group
    others = ~torch.nn.functional.pad(sinks, (0, edge - sinks.shape[1]))[:, None, :, None]
    first = others if there is None else others & there[:, :, :edge]
    rest = None if there is None else there[:, :, edge:]
    for begin, end, present in ((0, edge, first), (edge, keys.shape[2], rest)):
        if begin < end:
            part = keys[:, :, begin:end]
            levels, found = quantize(part, TOKENS, group, bits, zero_point, params.dtype, present)
            write_levels(levels, start + begin, codes, bits, values=False)
            params[:, :, (start + begin) // group : (start + end) // group] = found[..., order]


def padded(x: Tensor) -> Tensor:
    """Pad keys or values [..., d] to their stored channels with NaN, which no range includes."""
    more = stored_dim(x.shape[-1]) - x.shape[-1]
    return torch.nn.functional.pad(x, (0, more), value=float("nan")) if more else x


@by_rows()
def offload(k: Tensor, v: Tensor, padding: Tensor | None, cursor: Tensor, host: Pages) -> None:
    """Copy the new pairs k, v [B, H, T, d], padding included, to the host tier; on a GPU the copy may end after the
    op."""
    start = length_of(cursor)
    pairs = torch.stack([k, v], dim=3)[:, :, max(0, -start) :]
    put(host, max(0, start), stored(pairs, host.dtype, host.shape[-1]))


def select_topk(scores: Tensor, selected: Tensor) -> None:
    """Write the k tokens of largest score [B, H, C] to selected [B, H, k], in any order, and -1 if fewer are left.

    Tokens with a score below 0 are no candidates.
    """
    count = min(selected.shape[-1], scores.shape[-1])
    best, index = scores.topk(count, dim=-1)
    selected.fill_(EMPTY)
    selected[..., :count] = index.masked_fill(best < 0, EMPTY)


def prefetch(
    selected: Tensor, cursor: Tensor, host: Tensor, slots: Tensor, slot_index: Tensor, fetched: Tensor
) -> None:
    """Copy the selected [B, H, k] pairs that are not in `slots` [B, H, k, 2, d] from the host tier to the slots.

    Pairs that stay keep their slots. On a GPU the copy may end after the op: a `wait` must precede reading the slots.
    It mutates slots, slot_index [B, H, k] and fetched int64 [1], the number of copied bytes.
    """
    heads = torch.arange(slot_index[..., :1].numel(), device=selected.device).view_as(slot_index[..., :1]) << 32
    stays = (slot_index >= 0) & torch.isin(slot_index + heads, selected + heads)
    missing = (selected >= 0) & ~torch.isin(selected + heads, slot_index + heads)
    slot_index.masked_fill_(~stays, EMPTY)
    # A head's i-th missing pair goes to its i-th free slot; there are never more missing pairs than free slots.
    row, head, entry = missing.nonzero(as_tuple=True)
    rank = (missing.cumsum(-1) - 1)[row, head, entry]
    order = stays.to(torch.int8).argsort(dim=-1, stable=True)
    slot = order[row, head, rank]
    token = selected[row, head, entry]
    pairs = pairs_at(pairs_of(host, cursor), row, head, token.long())
    slots[row, head, slot] = decoded(pairs.to(slots.device), slots.dtype, slots.shape[-1])
    slot_index[row, head, slot] = token
    fetched += pairs.nbytes


def correct(
    scores: Tensor, cursor: Tensor, host: Tensor, slots: Tensor, slot_index: Tensor, corrected: Tensor, *kept: Any
) -> Tensor:
    """Copy the selected pairs that the slots lack to the slots.

    All offloads of low-bit tokens end before these copies: by stream order on a GPU, by op order on a CPU.

    Args:
        scores: [lanes, B, H, C], from `score_low_bit`.
        slots, slot_index: [B, H, k, 2, d] and [B, H, k], mutated.
        corrected: int64 [1], the number of copied bytes, mutated.
        kept: the query, the logits and the base of `score_low_bit`, and the mask. A GPU reads them instead of scores.

    Returns: the slots' new tokens, int32 [B, H, k] in any order. On a GPU their pairs may arrive later, but before
    `attend_scored` reads them.
    """
    chosen, token = torch.empty_like(slot_index), torch.arange(scores.shape[-1], device=scores.device)
    select_topk(scores[0].masked_fill(token >= cursor[:, LOW_BIT, None, None], EMPTY), chosen)
    prefetch(chosen, cursor, host, slots, slot_index, corrected)
    return chosen


def wait(after: Tensor, cursor: Tensor, slots: Tensor, slot_index: Tensor, selected: Tensor) -> None:
    """Block until the prefetch of `selected` into `slots` has ended. On a CPU it ends within its op.

    The schema declares its operands as mutated, so that no op selects again during the fetch. `after` is not read: this
    edge in the graph keeps the wait after the work that overlaps the copy.
    """
