"""What moves pairs between the tiers: append, offload, select, prefetch, wait. State tensors only, all in place."""

from __future__ import annotations

import torch
from torch import Tensor

from specache_compile.kernels.attention.attention_ops import ring_tokens
from specache_compile.kernels.codes.cpp_trellis import encoder
from specache_compile.kernels.codes.params import stored_scale
from specache_compile.kernels.codes.quantize import quantize_keys, quantize_values
from specache_compile.kernels.codes.trellis import is_trellis, quantize
from specache_compile.kernels.state.by_rows import by_rows
from specache_compile.kernels.state.center import centers, is_found, set_center
from specache_compile.kernels.state.cursor import LENGTH, LOW_BIT, NEXT_LOW_BIT, length_of
from specache_compile.kernels.state.layout import Layout, rotated
from specache_compile.kernels.state.page_table import Pages, pairs_of
from specache_compile.kernels.state.segments import picked, put
from specache_compile.kernels.state.sinks import keep_sinks
from specache_compile.kernels.state.stored_pairs import decoded, stored
from specache_compile.kernels.state.stored_tiers import EMPTY, StoredTiers

from .copy_queue import queue_of


@by_rows()
def append(
    k: Tensor,
    v: Tensor,
    padding: Tensor | None,
    cursor: Tensor,
    recent: Tensor,
    codes: Tensor,
    key_params: Tensor,
    value_params: Tensor,
    center: Tensor,
    sink_pairs: Tensor,
    sink_index: Tensor,
    key_bits: int,
    value_bits: int,
    rotate: bool,
    zero_point: str,
    frequencies: Tensor | None = None,
) -> None:
    """Put the new pairs k, v [B, H, T, d] into `recent`; what thereby leaves the window goes to the low-bit tier.

    padding bool [B, 1, 1, C] (False: the token is not there; None: all are): what is not there has no part in its
    group's range. frequencies [h]: RoPE's, where the keys' center can be found (None: it stays, or is their plain
    mean). Mutates recent [B, H, W, 2, d], codes [B, H, C, w] in the `Layout` of key_bits, value_bits, rotate,
    key_params [B, H, C/g, 2, d], value_params [B, H, C, 2, d/gv] (`params.py`; in the trellis code [B, H, C/g, 1, g]
    and [B, H, C, 1, 1]), center [B, H, 4, d] (`center.py`; a stepped one [B, H, 3, d], none [B, H, 0, d]) and
    sink_pairs [B, H, S, 2, d], whose tokens sink_index [B, 1, S] names (`sinks.py`).
    """
    layout = Layout(key_bits, value_bits, rotate)
    length, low_bit, next_low_bit = (int(cursor[0, i]) for i in (LENGTH, LOW_BIT, NEXT_LOW_BIT))
    new = torch.stack([k, v], dim=3)[:, :, max(0, -length) :]
    length = max(0, length)
    if next_low_bit > low_bit:
        window = torch.cat([ring_tokens(recent, low_bit, length), new], dim=2)
        leaving = window[:, :, : next_low_bit - low_bit]
        if not low_bit and is_found(center, frequencies, is_trellis(key_params)):
            there = None if padding is None else padding[..., :next_low_bit].mT
            set_center(leaving[:, :, :, 0], there, frequencies, center, codes.shape[2] // key_params.shape[2])
        tiers = StoredTiers(codes, key_params, value_params, center, sink_pairs, sink_index, recent)
        store_low_bit(leaving, padding, low_bit, tiers, layout, zero_point)
    first = max(length, next_low_bit)
    stop = length + new.shape[2]
    place = torch.arange(first, stop, device=recent.device) % recent.shape[2]
    recent.index_copy_(2, place, new[:, :, first - length :])


def store_low_bit(
    pairs: Tensor, padding: Tensor | None, start: int, tiers: StoredTiers, layout: Layout, zero_point: str
) -> None:
    """Quantise pairs [B, H, T, 2, d], T a multiple of g, into the low-bit tier from token `start` on.

    The pairs of sinks among them are kept in `sink_pairs` too. padding: as for `append`. What was centered or rotated
    is rounded to the pairs' dtype before it is quantised.
    """
    stop = start + pairs.shape[2]
    codes, key_params, value_params, center = tiers[:4]
    if not layout.is_quantised:
        codes[:, :, start:stop] = pairs.flatten(3)
        return
    group = codes.shape[2] // key_params.shape[2]
    width = pairs.shape[-1]
    keys, values = pairs.unbind(-2)
    if center.shape[2]:
        keys = keys.float() - centers(center, group, start // group, stop // group)
    keys, values = ((rotated(x) if layout.is_rotated else x).to(pairs.dtype) for x in (keys, values))
    there = None if padding is None else padding[..., start:stop].mT
    key_codes, value_codes = layout.split(codes[:, :, start:stop], width)
    key_params = key_params[:, :, start // group : stop // group]
    sinks = keep_sinks(pairs, start, tiers.sink_pairs, tiers.sink_index)
    if is_trellis(key_params):
        store_in_trellis(keys, key_codes, key_params)
    else:
        store_keys(keys, sinks, there, key_codes, key_params, layout.key_bits, zero_point)
    value_params = value_params[:, :, start:stop]
    if is_trellis(value_params):
        store_in_trellis(values, value_codes, value_params)
    else:
        channels = width // value_params.shape[-1]
        value_codes[...], value_params[...] = quantize_values(
            values, channels, layout.value_bits, zero_point, value_params.dtype
        )


def store_in_trellis(x: Tensor, codes: Tensor, params: Tensor) -> None:
    """Keys or values [B, H, T, d] into their codes and scales."""
    codes[...], scale = quantize(x, encoder(x.device))
    params[...] = stored_scale(scale, params.dtype).view(params.shape)


def store_keys(
    keys: Tensor, sinks: Tensor, there: Tensor | None, codes: Tensor, params: Tensor, bits: int, zero_point: str
) -> None:
    """Keys [B, H, T, d] into the levels of their groups. sinks: bool [B, n], which of the first have no part in them,
    as those that are not `there` [B, 1, T, 1]."""
    group = keys.shape[2] // params.shape[2]
    # Behind its last sink a prompt takes the way of those without: a range with exceptions takes several passes.
    edge = -(-sinks.shape[1] // group) * group
    others = ~torch.nn.functional.pad(sinks, (0, edge - sinks.shape[1]))[:, None, :, None]
    first = others if there is None else others & there[:, :, :edge]
    rest = None if there is None else there[:, :, edge:]
    for begin, end, present in ((0, edge, first), (edge, keys.shape[2], rest)):
        if begin < end:
            codes[:, :, begin:end], params[:, :, begin // group : end // group] = quantize_keys(
                keys[:, :, begin:end], group, bits, zero_point, params.dtype, present
            )


@by_rows()
def offload(k: Tensor, v: Tensor, padding: Tensor | None, cursor: Tensor, host: Tensor) -> None:
    """Send the new pairs k, v [B, H, T, d] to the host tier, those too that `padding` hides; the copy may end later."""
    start = length_of(cursor)
    # The job's own memory: k and v may be reused before it runs.
    pairs = torch.stack([k, v], dim=3)[:, :, max(0, -start) :]

    def job() -> None:
        put(host, max(0, start), stored(pairs, host))

    queue = queue_of(cursor)
    if queue is None:
        job()
    else:
        queue.submit_offload(job)


def select_topk(scores: Tensor, selected: Tensor) -> None:
    """The k tokens of largest score [B, H, C] go into selected [B, H, k], in any order; score below 0: no
    candidate; -1: none left."""
    count = min(selected.shape[-1], scores.shape[-1])
    best, index = scores.topk(count, dim=-1)
    selected.fill_(EMPTY)
    selected[..., :count] = index.masked_fill(best < 0, EMPTY)


def prefetch(
    selected: Tensor, cursor: Tensor, host: Tensor, slots: Tensor, slot_index: Tensor, fetched: Tensor
) -> None:
    """Bring the selected [B, H, k] pairs from the host tier into `slots` [B, H, k, 2, d], only those not there yet.

    The copy may end after the op: `wait` before the slots are read. Mutates slots, slot_index [B, H, k], and fetched
    int64 [1], which counts the bytes that travelled.
    """

    pairs = pairs_of(host, cursor)

    def job() -> None:
        refill(selected, pairs, slots, slot_index, fetched)

    queue = queue_of(cursor)
    if queue is None:
        job()
    else:
        queue.submit_prefetch(slots, job)


@by_rows(0)
def correct(
    scores: Tensor, cursor: Tensor, host: Tensor, slots: Tensor, slot_index: Tensor,
    corrected: Tensor,
) -> Tensor:  # fmt: skip
    """Bring the pairs that lane 0 wants now, and the slots lack: scores [lanes, B, H, C] as `score_low_bit` gives them.

    Stands behind the offload of every token in the low-bit tier: by a `wait` on its slots, or since the step has waited
    for them at its beginning. Returns the tokens that the slots hold from here on, int32 [B, H, k] in any order; on a
    GPU their pairs may come later, but before `attend_scored` reads them. Mutates slots [B, H, k, 2, d], slot_index
    [B, H, k], and corrected int64 [1], the bytes that travelled.
    """
    chosen, low_bit = torch.empty_like(slot_index), int(cursor[0, LOW_BIT])

    def job() -> None:
        select_topk(scores[0, :, :, :low_bit], chosen)
        refill(chosen, host, slots, slot_index, corrected)

    queue = queue_of(cursor)
    if queue is None:
        job()
    else:
        queue.correcting += queue.run_now(job)
    return chosen


def refill(selected: Tensor, host: Tensor | Pages, slots: Tensor, slot_index: Tensor, fetched: Tensor) -> None:
    """The copy behind `prefetch` and `correct`: pairs that stay keep their place."""
    same = selected.unsqueeze(-1) == slot_index.unsqueeze(-2)  # [B, H, selected, slot]
    stays = same.any(-2) & (slot_index >= 0)
    missing = (selected >= 0) & ~same.any(-1)
    slot_index.masked_fill_(~stays, EMPTY)
    # The i-th missing pair of a head goes to its i-th free slot: there are never more missing than free.
    row, head, want = missing.nonzero(as_tuple=True)
    rank = (missing.cumsum(-1) - 1)[row, head, want]
    order = stays.to(torch.int8).argsort(dim=-1, stable=True)
    slot = order[row, head, rank]
    token = selected[row, head, want]
    pairs = picked(host, row, head, token.long())
    slots[row, head, slot] = decoded(pairs.to(slots.device), slots.dtype, slots.shape[-1])
    slot_index[row, head, slot] = token
    fetched += pairs.nbytes


def wait(after: Tensor, cursor: Tensor, slots: Tensor, slot_index: Tensor, selected: Tensor) -> None:
    """Block until the prefetch of `selected` into `slots` has ended. Declared to mutate what it guards: nobody may choose
    anew while the old choice is being fetched.

    `after` is not read: it is the edge in the graph that keeps the wait behind the work that hides the copy.
    """
    queue = queue_of(cursor)
    if queue is not None:
        queue.wait_for(slots)
