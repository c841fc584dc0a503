"""Triton: `extend.extend_attention`, exact attention of new tokens over the host tier and over themselves.

Blocks of the host tier travel through two staging buffers: one is copied while the other is used. The running softmax
keeps its state on the device. FLOPs: 4·T·n·Hq·d; PCIe: 4·n·H·d bytes per layer, for any number of new tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specache_compile.kernels.decode.triton_decode import MASK_STRIDES, Sums, contiguous_channels, mask_form
from specache_compile.kernels.movement import copy_stream
from specache_compile.kernels.state.cursor import lengths_of
from specache_compile.kernels.state.operands import AttentionInputs, takes
from specache_compile.kernels.state.page_table import Pages, pairs_of, rows_of_pages
from specache_compile.kernels.state.stored_pairs import decoded

from .query import check_covers
from .triton_logits import LOG2E, finite, visible

# Tokens of a host block: 8 MB per row with 8 heads and d = 128, large enough for full PCIe speed.
HOST_BLOCK = 2048

# Bytes of a padded row of channels → options of `attend_block`. Each tile fits in 99 KiB, the most shared memory of a
# program on an A6000 or a 4090 (tools/compile_kernels.py checks it).
TILES = {
    256: dict(ROWS=64, KEYS=32, num_warps=4, num_stages=3),
    512: dict(ROWS=64, KEYS=32, num_warps=8, num_stages=2),
    1024: dict(ROWS=32, KEYS=16, num_warps=8, num_stages=2),
    2048: dict(ROWS=16, KEYS=16, num_warps=8, num_stages=1),
}


@triton.jit(do_not_specialize=[*MASK_STRIDES, "count", "size", "first"])
def attend_block(
    # q [B, Hq, T, d]; keys and values [B, H, size, d], of q's dtype; mask [B, Hq, T, ≥ first + size] uint8 or additive.
    q, keys, values, mask,
    # The running softmax, read and written: a `Sums` of partial [B, Hq, T, d], peaks and totals [B, Hq, T], contiguous.
    sums,
    # Strides in elements: the first three of q, of keys and of values, whose channels are contiguous; m_batch, ...: of
    # the mask, 0 for broadcast dimensions.
    strides, m_batch, m_head, m_row, m_token, scale, softcap,
    # Hq, H, T new tokens, tokens in the block, and the index of the block's first token.
    query_heads, heads, count, size, first,
    d: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, CAP: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS new tokens of one query head over `size` pairs, which begin at token `first`.

    KEYS: pairs per product. CHANNELS: d, padded. Bytes: 4·size·d of pairs, which programs of one KV head share in the
    L2 cache, 2·ROWS·d of q, and 4·ROWS·(d + 2) of the state, read and written. FLOPs: 4·ROWS·size·d, half of that with
    CAUSAL.
    """
    number = tl.program_id(0).to(tl.int64)
    batch, query_head = number // query_heads, number % query_heads
    head = query_head // (query_heads // heads)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)
    real, inside = row < count, channel < d
    at = number * count + row
    q_at = q + batch * strides[0] + query_head * strides[1] + row.to(tl.int64) * strides[2]
    keys += batch * strides[3] + head * strides[4]
    values += batch * strides[6] + head * strides[7]
    precision: tl.constexpr = "ieee" if q.dtype.element_ty == tl.float32 else "tf32"
    query = tl.load(q_at[:, None] + channel[None, :], real[:, None] & inside[None, :], 0.0)
    peak = tl.load(sums.peaks + at, real, float("-inf"))
    total = tl.load(sums.totals + at, real, 0.0)
    summed = tl.load(sums.partial + at[:, None] * d + channel[None, :], real[:, None] & inside[None, :], 0.0)
    mask += batch * m_batch
    mask_row = query_head * m_head + row.to(tl.int64) * m_row
    stop = size
    if CAUSAL:
        stop = tl.minimum(size, (tl.program_id(1) + 1) * ROWS)
    for start in range(0, stop, KEYS):
        token = (start + tl.arange(0, KEYS)).to(tl.int64)
        there = token < size
        loaded = there[:, None] & inside[None, :]
        key = tl.load(keys + token[:, None] * strides[5] + channel[None, :], loaded, 0.0)
        value = tl.load(values + token[:, None] * strides[8] + channel[None, :], loaded, 0.0)
        logits = tl.dot(query, tl.trans(key), input_precision=precision) * scale
        seen = real[:, None]
        if CAUSAL:
            seen = seen & (token[None, :] <= row[:, None])
        logits = visible(logits, softcap, mask, mask_row, (first + token) * m_token, there, seen, MASK, CAP)
        higher = tl.maximum(peak, tl.max(logits, 1))
        base = finite(higher)
        # `tl.exp` needs four more instructions, for results below float32's smallest normal number.
        weights, shrink = tl.exp2((logits - base[:, None]) * LOG2E), tl.exp2((peak - base) * LOG2E)
        peak, total = higher, total * shrink + tl.sum(weights, 1)
        summed = tl.dot(weights.to(value.dtype), value, summed * shrink[:, None], input_precision=precision)
    tl.store(sums.peaks + at, peak, real)
    tl.store(sums.totals + at, total, real)
    tl.store(sums.partial + at[:, None] * d + channel[None, :], summed, real[:, None] & inside[None, :])


@takes(new=AttentionInputs)
def extend_attention(new: AttentionInputs, host: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Compute `extend.extend_attention`, one row after the other.

    The host reads the published lengths of the cursor, since no captured step contains this op.
    """
    pairs, lengths, settings = pairs_of(host, new.cursor), lengths_of(new.cursor), (scale, softcap)
    if len(lengths) == 1 and lengths[0] >= 0:
        return extend_rows(new, lengths[0], pairs, *settings)
    out = new.q.new_zeros(new.q.shape)  # rows without tokens stay 0
    for number, (pages, length) in enumerate(zip(rows_of_pages(pairs), lengths, strict=True)):
        row, begin = slice(number, number + 1), max(0, -length)
        q, k, v = (x[row, :, begin:] for x in new[:3])
        if q.shape[2]:
            mask = new.mask[row] if new.mask is not None and new.mask.shape[0] > 1 else new.mask
            given = new._replace(q=q, k=k, v=v, mask=mask)
            out[row, :, begin:] = extend_rows(given, max(0, length), pages, *settings)
    return out


def extend_rows(new: AttentionInputs, length: int, host: Pages, scale: float, softcap: float | None) -> Tensor:
    """Run `extend_attention` for rows with `length` cached tokens each."""
    q, k, v, given, sinks, _ = contiguous_channels(new)
    batch, query_heads, count, d = q.shape
    if given is not None:
        check_covers(given, length + count)
    causal = given is None or given.shape[2] == 1
    channels = max(16, triton.next_power_of_2(d))
    tile = TILES[max(min(TILES), channels * q.dtype.itemsize)]
    kind, mask, mask_strides = mask_form(given, q)
    rows = (batch, query_heads, count)
    out = torch.zeros(*rows, d, dtype=torch.float32, device=q.device)
    peak = torch.full(rows, float("-inf"), dtype=torch.float32, device=q.device)
    total = torch.zeros(rows, dtype=torch.float32, device=q.device)
    if sinks is not None:
        peak.copy_(sinks.float().view(1, -1, 1).expand(rows))
        total.fill_(1.0)

    def attend(keys: Tensor, values: Tensor, first: int, causal: bool) -> None:
        attend_block[batch * query_heads, triton.cdiv(count, tile["ROWS"])](
            q, keys, values, mask, Sums(out, peak, total),
            (*q.stride()[:3], *keys.stride()[:3], *values.stride()[:3]), **mask_strides, scale=scale,
            softcap=softcap or 1.0, query_heads=query_heads, heads=k.shape[1], count=count, size=keys.shape[2],
            first=first, d=d, CAUSAL=causal, MASK=kind, CAP=softcap is not None, CHANNELS=channels, **tile,
        )  # fmt: skip

    for first, block in copy_stream.host_blocks(host, length, HOST_BLOCK, q.device):
        attend(*decoded(block, q.dtype, d).unbind(3), first, False)
    attend(k, v, length, causal)
    return (out / total.masked_fill(total == 0, 1.0).unsqueeze(-1)).to(q.dtype)
