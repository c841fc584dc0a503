"""Triton: copy pairs between the device and pinned host memory, accessed directly over PCIe.

These are the copies of `tier_ops.prefetch`, and of `tier_ops.offload` in a decode step. New pairs reach tiers on the
device by the same kernel. Indices never leave the device, so that the step can be captured.
"""

# A host pair (K and V) is one contiguous read of 2·d elements (512 B at d = 128), and a program has all k pairs of a
# head in flight. So few programs saturate the link, and leave the other multiprocessors to concurrent compute. Without
# concurrent compute each head has a separate program, so that no head waits for another one's read.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specache_compile.kernels.codes.triton_levels import ROUND
from specache_compile.kernels.state import stored_pairs
from specache_compile.kernels.state.triton_cursor import AT_LENGTH, AT_NEXT_LOW_BIT, PAGE_TOKENS, place_in_page

LARGEST = tl.constexpr(stored_pairs.LARGEST)
LARGEST_E4M3, SMALLEST_NORMAL = tl.constexpr(torch.finfo(stored_pairs.FP8).max), tl.constexpr(2.0**-6)
# e4m3 codes of numbers below the smallest normal one count in these.
E4M3_STEPS = tl.constexpr(2.0**9)
# Slots per step that are compared with all selected tokens.
CHUNK = 32
# Programs of a gather concurrent with compute: 16 programs of 64 pairs are five times the 200 pairs that a link of
# 50 GB/s and 2 µs latency has in flight.
PROGRAMS = 16
# Elements of a gather tile: 64 rows of 2·128 channels, 64 registers of each of 256 threads.
GATHER = 16384


@triton.jit(do_not_specialize=["heads", "columns"])
def fetch_missing(
    # selected [B, H, k] int32 (-1: none); cursor int64 [B, columns]; host: a tier in pages (`page_table.py`), pinned.
    # All contiguous.
    selected, cursor, host,
    # Read and written: slots [B, H, k, 2, d], slot_index [B, H, k] int32 (-1: empty), traffic int64 [1] in bytes.
    slots, slot_index, traffic,
    # B·H and H; columns of the cursor; k; bytes of a pair.
    count, heads, columns, top_k, row_bytes,
    d: tl.constexpr, width: tl.constexpr, SELECTED: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: a strided part of the KV heads. Pairs that stay keep their slots; the i-th missing pair goes to the
    i-th free slot.

    width: elements of a stored key: d, or the bytes of a rounded key and its scale (`stored_pairs.py`), which is
    widened here.
    SELECTED: k, padded. CHUNK: slots compared per step. COLUMNS: elements of a pair copied per step. Bytes per missing
    pair: the stored pair over PCIe, 4·d written, 16·k for its indices. FLOPs: 2·d per rounded pair; 3·k² comparisons.
    """
    ROUNDED: tl.constexpr = host.dtype.element_ty == tl.int8
    pair: tl.constexpr = 2 * d
    number, within = tl.arange(0, SELECTED), tl.arange(0, CHUNK)
    moved = tl.zeros([], tl.int64)
    for head in range(tl.program_id(0), count, tl.num_programs(0)):
        bh = tl.zeros([], tl.int64) + head
        token = tl.load(selected + bh * top_k + number, number < top_k, -1)
        present = tl.zeros([SELECTED], tl.int32)
        for start in range(0, top_k, CHUNK):
            slot = start + within
            index = tl.load(slot_index + bh * top_k + slot, slot < top_k, -2)
            present |= tl.max((token[:, None] == index[None, :]).to(tl.int32), 1)
        missing = (token >= 0) & (present == 0)
        rank = tl.cumsum(missing.to(tl.int32), 0) - 1
        place = tl.zeros([SELECTED], tl.int32)
        free_before = tl.zeros([], tl.int32)
        for start in range(0, top_k, CHUNK):
            slot = start + within
            index = tl.load(slot_index + bh * top_k + slot, slot < top_k, -2)
            stays = tl.max(((token[:, None] == index[None, :]) & (token[:, None] >= 0)).to(tl.int32), 0)
            free = (slot < top_k) & (stays == 0)
            order = free_before + tl.cumsum(free.to(tl.int32), 0) - 1
            taken = missing[:, None] & free[None, :] & (order[None, :] == rank[:, None])
            place += tl.sum(tl.where(taken, slot[None, :], 0), 1)
            free_before += tl.sum(free.to(tl.int32), 0)
            tl.debug_barrier()  # warps may hold the same indices: wait before one overwrites them
            tl.store(slot_index + bh * top_k + slot, -1, free)
        tl.debug_barrier()  # mark empty slots before writing the indices of filled ones
        tl.store(slot_index + bh * top_k + place, token, missing)
        run = place_in_page(cursor + bh // heads * columns, bh % heads, token, heads, missing)
        source, scales = stored_at(host, run, width)
        target = slots + (bh * top_k + place) * pair
        if ROUNDED:  # once per pair: with the columns, scales would be most of the loads over PCIe
            key_scale = tl.load(scales, missing, 0.0)
            value_scale = tl.load(scales + 1, missing, 0.0)
        for start in range(0, pair, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            there = missing[:, None] & (column < pair)[None, :]
            if ROUNDED:
                is_key = (column < d)[None, :]
                at = column if width == d + 4 else tl.where(column < d, column, column + (width - 4 - d))
                codes = tl.load(source[:, None] + at[None, :], there, 0)
                scale = tl.where(is_key, key_scale[:, None], value_scale[:, None])
                row = (codes.to(tl.float32) * scale).to(slots.dtype.element_ty)
            else:
                row = tl.load(source[:, None] + column[None, :], there)
            tl.store(target[:, None] + column[None, :], row, there)
        moved += tl.sum(missing.to(tl.int64), 0)
    tl.atomic_add(traffic, moved * row_bytes, sem="relaxed")  # read only after the stream has ended


@triton.jit
def stored_at(tier, run, width: tl.constexpr):
    """Return pointers to the elements and to the key's scale of pairs, whose value's scale is the next one.

    run: the pairs' indices among all heads' tokens. Pairs that are not rounded have no scales.
    """
    if tier.dtype.element_ty == tl.int8:
        block, token = tier + run // PAGE_TOKENS * (PAGE_TOKENS * 2 * width), run % PAGE_TOKENS
        scales = (block + PAGE_TOKENS * 2 * (width - 4)).to(tl.pointer_type(tl.float32), bitcast=True) + 2 * token
        elements = block + token * (2 * (width - 4))
    else:
        elements = tier + run * (2 * width)
        scales = elements
    return elements, scales


@triton.jit
def rounded(x):
    """Return codes int8 [BLOCK, CHANNELS] and scales float32 [BLOCK] of x, as in `stored_pairs.stored`.

    Codes are rounded to nearest, ties to even. An element that is not finite makes its scale not finite.
    """
    exact = x.to(tl.float32)
    finite = tl.abs(exact) < float("inf")
    largest = tl.where(tl.min(finite.to(tl.int32), 1) > 0, tl.max(tl.abs(exact), 1), float("nan"))
    scale = tl.div_rn(largest, tl.zeros_like(largest) + LARGEST)
    codes = tl.div_rn(exact, tl.broadcast_to(tl.where(scale > 0, scale, 1.0)[:, None], exact.shape))
    codes = tl.where(scale[:, None] > 0, (codes + ROUND) - ROUND, 0.0)
    return codes.to(tl.int8), scale


@triton.jit
def to_e4m3(x):
    """Return the code of the nearest number to x, with even mantissa in a tie, at most ±448; NaN stays NaN."""
    x = x.to(tl.float32)
    size = tl.where(x == x, tl.minimum(tl.abs(x), LARGEST_E4M3), 0.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (127 - 7) * 8
    small = ((size * E4M3_STEPS + ROUND) - ROUND).to(tl.int32)
    code = tl.where(size < SMALLEST_NORMAL, small, normal)
    code = tl.where(x == x, code, 0x7F) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return code.to(tl.uint8)


@triton.jit(do_not_specialize=["count", "columns"])
def write_pairs(
    # k and v [B, H, T, d]; cursor int64 [B, columns]; written: tier, in pages or a ring, contiguous.
    k, v, cursor, tier,
    # The first three strides of k and of v in elements, with contiguous channels.
    k_strides, v_strides,
    # H, T new tokens; columns of the cursor.
    heads, count, columns,
    d: tl.constexpr, width: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One program: write BLOCK new pairs of one head to a tier, in the format of its dtype (`stored_pairs.py`).

    width: as in `fetch_missing`. RING: W of a tier [B, H, W, 2, d], where token t goes to t mod W if it stays in the
    window; 0 for pages. CHANNELS: d, padded. Bytes per pair: 4·d read, the stored pair written. FLOPs: 6·d per rounded
    pair.
    """
    kind: tl.constexpr = tier.dtype.element_ty
    bh = tl.program_id(0).to(tl.int64)
    new = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, CHANNELS)
    batch, head = bh // heads, bh % heads
    cursor += batch * columns
    length = tl.load(cursor + AT_LENGTH)
    if RING > 0:
        new += tl.maximum(tl.load(cursor + AT_NEXT_LOW_BIT) - length, 0)
    token = length + new
    real = (new < count) & (token >= 0)
    inside = real[:, None] & (channel < d)[None, :]
    k += batch * k_strides[0] + head * k_strides[1]
    v += batch * v_strides[0] + head * v_strides[1]
    key = tl.load(k + new[:, None] * k_strides[2] + channel[None, :], inside, 0.0)
    value = tl.load(v + new[:, None] * v_strides[2] + channel[None, :], inside, 0.0)
    run = bh * RING + token % RING if RING > 0 else place_in_page(cursor, head, token, heads, real)
    row, scales = stored_at(tier, run, width)
    if kind == tl.int8:
        key, key_scale = rounded(key)
        value, value_scale = rounded(value)
        tl.store(scales, key_scale, real)
        tl.store(scales + 1, value_scale, real)
    elif kind == tl.uint8:
        key, value = to_e4m3(key), to_e4m3(value)
    place = row[:, None] + channel[None, :]
    tl.store(place, key, inside)
    tl.store(place + (width - 4 if kind == tl.int8 else width), value, inside)


def gather(
    selected: Tensor, cursor: Tensor, host: Tensor, slots: Tensor, slot_index: Tensor, traffic: Tensor,
    programs: int = PROGRAMS,
) -> None:  # fmt: skip
    """Run `tier_ops.prefetch` on the current stream, with at most this many `programs`.

    `host` is in memory that the GPU can read.
    """
    batch, heads, top_k = selected.shape
    if top_k == 0:
        return
    d, width = slots.shape[-1], host.shape[-1]
    rows = triton.next_power_of_2(top_k)
    columns = min(triton.next_power_of_2(2 * d), max(16, GATHER // rows))
    fetch_missing[(min(batch * heads, programs),)](
        selected, cursor, host, slots, slot_index, traffic,
        count=batch * heads, heads=heads, columns=cursor.stride(0), top_k=top_k,
        row_bytes=2 * width * host.element_size(), d=d, width=width, SELECTED=rows, CHUNK=min(CHUNK, rows),
        COLUMNS=columns, num_warps=8,
    )  # fmt: skip


def write_through(k: Tensor, v: Tensor, cursor: Tensor, tier: Tensor, ring: int = 0) -> None:
    """Write the new pairs k, v [B, H, T, d] directly to a tier in pages, on the current stream.

    ring: the window W of a ring tier [B, H, W, 2, d], for pairs that stay in it; 0 for pages.
    """
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    batch, heads, count, d = k.shape
    most = min(count, ring or count)
    block = min(16, triton.next_power_of_2(most))
    write_pairs[batch * heads, triton.cdiv(most, block)](
        k, v, cursor, tier, k.stride()[:3], v.stride()[:3],
        heads=heads, count=count, columns=cursor.stride(0), d=d, width=tier.shape[-1], RING=ring, BLOCK=block,
        CHANNELS=triton.next_power_of_2(d), num_warps=1 if count == 1 else 4,
    )  # fmt: skip
