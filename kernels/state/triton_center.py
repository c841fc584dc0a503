"""Triton: find a head's center, and compute its share of the logits. `center` has the formulas.

Shapes as in `triton_decode`. Products have float32's precision under any torch setting: a share is as large as the
keys' biases, and must equal the subtracted center.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .center import BETA, GAMMA, MEAN_OF, PARTNER, STEPPED, THETA, tokens_of_one
from .triton_cursor import AT_LENGTH, AT_LOW_BIT, AT_NEXT_LOW_BIT
from .triton_pairs import load_pairs

AT_BETA, AT_GAMMA, AT_THETA, AT_PARTNER = (tl.constexpr(row) for row in (BETA, GAMMA, THETA, PARTNER))
NEWEST, STEPPED_ROWS = tl.constexpr(MEAN_OF), tl.constexpr(STEPPED)
TOKEN_BLOCK, CHANNEL_BLOCK, ANGLE_BLOCK = 16, 16, 8
# `add_shares` treats 16 groups of a stepped center as one group, the smallest number of columns of a product.
STEPS = tl.constexpr(16)
# Sums of a program: 64 registers of each of 128 threads; and the rows of a product.
SUMS, MOST_ROWS = 8192, 128


@triton.jit(do_not_specialize=["heads", "columns"])
def find_center(
    # k [B, H, T, d]; padding [B, 1, 1, C] uint8, 0: padding, or None; frequencies [turning], unused if turning is 0;
    # cursor int64 [B, columns]; recent [B, H, W, 2, d]; written: center float32 [B, H, rows, d].
    k, padding, frequencies, cursor, recent, center, k_strides,
    # Stride of the padding's rows, H, columns of the cursor.
    p_batch, heads, columns,
    d: tl.constexpr, rows: tl.constexpr, turning: tl.constexpr, window: tl.constexpr, STEP: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one head, in the step in which the first tokens enter the low-bit tier.

    turning: half the number of channels that RoPE rotates; if 0, θ and γ are 0. STEP: tokens that share one center.
    CHANNELS: d, padded. Bytes: 4·d per token of the newest `MEAN_OF`, half of it from the cache. FLOPs: about 60·d per
    token, for sine and cosine.
    """
    bh = tl.program_id(0).to(tl.int64)
    cursor += (bh // heads) * columns
    length, stop = tl.load(cursor + AT_LENGTH), tl.load(cursor + AT_NEXT_LOW_BIT)
    if (tl.load(cursor + AT_LOW_BIT) > 0) | (stop == 0):
        return
    channel = tl.arange(0, CHANNELS)
    turns, first_half = channel < 2 * turning, channel < turning
    theta = tl.load(frequencies + tl.where(first_half, channel, channel - turning), turns, 0.0).to(tl.float32)
    partner = tl.where(turns, tl.where(first_half, channel + turning, channel - turning), 0)
    sign = tl.where(turns, tl.where(first_half, -1.0, 1.0), 0.0)
    inside = (channel < d)[None, :]
    beta, gamma = tl.zeros([CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
    count = 0.0
    for start in range(tl.maximum(stop - NEWEST, 0), stop, BLOCK):
        token = start + tl.arange(0, BLOCK)
        there = token < stop
        if padding is not None:
            there &= tl.load(padding + (bh // heads) * p_batch + token, there, 0) != 0
        mask = there[:, None] & inside
        x = load_pairs(k, k_strides, recent, token[:, None], channel[None, :], mask, bh, heads, length, 0, window, d)
        there &= tl.min((tl.abs(x) < float("inf")).to(tl.int32), 1) != 0
        x = tl.where(there[:, None], x, 0.0)
        y = load_pairs(k, k_strides, recent, token[:, None], partner[None, :], mask, bh, heads, length, 0, window, d)
        y = tl.where(there[:, None], y * sign[None, :], 0.0)
        angle = token.to(tl.float32)[:, None] * theta[None, :]
        cos, sin = tl.cos(angle), tl.sin(angle)
        beta += tl.sum(x * cos - y * sin, 0)
        # A quarter turn; channels that do not rotate add 0.
        gamma += tl.sum(tl.where(turns[None, :], y * cos + x * sin, 0.0), 0)
        count += tl.sum(there.to(tl.float32), 0)
    count = tl.maximum(count, 1.0)
    row = center + bh * rows * d + channel
    if STEP > 1:
        cos, sin = tl.zeros([CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
        for place in range(STEP):
            cos += tl.cos(place * theta)
            sin += tl.sin(place * theta)
        turned = cos * beta + sin * gamma
        beta, gamma = turned / STEP, (cos * gamma - sin * beta) / STEP
        theta *= STEP
    tl.store(row + AT_BETA * d, beta / count, channel < d)
    tl.store(row + AT_GAMMA * d, gamma / count, channel < d)
    tl.store(row + AT_THETA * d, theta, channel < d)
    if rows > AT_PARTNER:
        tl.store(row + AT_PARTNER * d, sign * (partner + 1).to(tl.float32), channel < d)


@triton.jit
def group_centers(center, bh, start, channel, d: tl.constexpr, group: tl.constexpr, rows: tl.constexpr):
    """Return the centers of the keys [g, D] of the group that begins at token `start`, as one row if stepped.

    The two angles that are added are those of `share_of_center`."""
    first, place = start, tl.arange(0, group)[:, None]
    if rows == STEPPED_ROWS:
        first, place = start // group // STEPS * STEPS, start // group % STEPS
    row, inside = center + bh * rows * d + channel, channel < d
    beta, gamma = tl.load(row + AT_BETA * d, inside, 0.0), tl.load(row + AT_GAMMA * d, inside, 0.0)
    theta = tl.load(row + AT_THETA * d, inside, 0.0)
    angle = first.to(tl.float32) * theta
    cos, sin = tl.cos(angle), tl.sin(angle)
    angle = place.to(tl.float32) * theta
    return tl.cos(angle) * (cos * beta + sin * gamma) + tl.sin(angle) * (cos * gamma - sin * beta)


@triton.jit(do_not_specialize=["rows", "batch", "heads", "columns"])
def write_angles(
    # center float32 [B, H, center_rows, d]; cursor int64 [B, columns]; written: angles float32 [B, g + C/g, 2, d].
    center, cursor, angles,
    # g + C/g, H, columns of the cursor.
    rows, heads, columns,
    d: tl.constexpr, group: tl.constexpr, center_rows: tl.constexpr, STEP: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK rows of cosines and sines of angles, of one batch row.

    The rows are the positions in a group, then the first tokens of the groups in the low-bit tier. STEP: tokens that
    share one center, which count as one token here. CHANNELS: d, padded. Per row 8·d bytes written, about 60·d FLOPs.
    """
    row, channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, CHANNELS)
    batch = tl.program_id(1).to(tl.int64)
    token = tl.where(row < group, row, (row - group) * group)
    low_bit = tl.load(cursor + batch * columns + AT_LOW_BIT)
    center += batch * heads * center_rows * d
    angles += batch * rows * (2 * d)
    known = (row < rows) & ((row < group) | (token < low_bit // STEP))
    there = known[:, None] & (channel < d)[None, :]
    angle = token.to(tl.float32)[:, None] * tl.load(center + AT_THETA * d + channel, channel < d, 0.0)[None, :]
    at = angles + row[:, None] * (2 * d) + channel[None, :]
    tl.store(at, tl.cos(angle), there)
    tl.store(at + d, tl.sin(angle), there)


@triton.jit
def add_waves(sums, factor, query, wave):
    """Add Σ over channels of factor [groups, c] · query [ROWS, c] · wave [g, c] to sums [groups · ROWS, g]."""
    rows = tl.reshape(factor[:, None, :] * query[None, :, :], [factor.shape[0] * query.shape[0], query.shape[1]])
    # Three products of 19 bits have an error below the rounding of a float32 sum.
    return tl.dot(rows, tl.trans(wave), sums, input_precision="tf32x3")


@triton.jit(do_not_specialize=["columns"])
def add_shares(
    # q [B, Hq, lanes, d]; center float32 [B, H, center_rows, d]; angles from `write_angles`; cursor int64 [B, columns].
    q, center, angles, cursor,
    # Written: shares float32 [B, Hq, lanes, C].
    shares,
    q_batch, q_head, q_lane, scale,
    # H; C in tokens; columns of the cursor; rows of angles.
    heads, capacity, columns, angle_rows,
    d: tl.constexpr, group: tl.constexpr, lanes: tl.constexpr, queries: tl.constexpr, center_rows: tl.constexpr,
    STEP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One program: GROUPS groups of tokens of one KV head, for all its query heads and lanes.

    STEP: as in `write_angles`. ROWS: G·lanes, padded. CHANNELS: channels per step of the products. Bytes read from the
    cache: 8·d·(g + GROUPS) of the table; written: 4·G·lanes per token. FLOPs: 12·G·lanes·d per token.
    """
    bh, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS
    low_bit = tl.load(cursor + (bh // heads) * columns + AT_LOW_BIT) // STEP
    if first * group >= low_bit:
        return
    batch, head = bh // heads, bh % heads
    angles += batch * angle_rows * (2 * d)
    row = tl.arange(0, ROWS)
    q_row = q + batch * q_batch + (head * queries + row // lanes) * q_head + row % lanes * q_lane
    number, place = first + tl.arange(0, GROUPS), tl.arange(0, group)
    known = (number * group < low_bit)[:, None]
    sums = tl.zeros([GROUPS * ROWS, group], tl.float32)
    for start in range(0, d, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)
        inside = (channel < d)[None, :]
        query = tl.load(q_row[:, None] + channel[None, :], (row < queries * lanes)[:, None] & inside, 0.0)
        query = query.to(tl.float32) * scale
        at = center + bh * center_rows * d + channel[None, :]
        beta, gamma = tl.load(at + AT_BETA * d, inside, 0.0), tl.load(at + AT_GAMMA * d, inside, 0.0)
        at = angles + (group + number)[:, None] * (2 * d) + channel[None, :]
        cos, sin = tl.load(at, known & inside, 0.0), tl.load(at + d, known & inside, 0.0)
        wave = angles + place[:, None] * (2 * d) + channel[None, :]
        sums = add_waves(sums, cos * beta + sin * gamma, query, tl.load(wave, inside, 0.0))
        sums = add_waves(sums, cos * gamma - sin * beta, query, tl.load(wave + d, inside, 0.0))
    both = tl.arange(0, GROUPS * ROWS)
    number, row = first + both // ROWS, both % ROWS
    real = (row < queries * lanes) & (number * group < low_bit)
    out = shares + ((bh * queries + row // lanes) * lanes + row % lanes) * capacity + number * group
    tl.store(out[:, None] + place[None, :], sums, real[:, None])


def set_center(
    k: Tensor, padding: Tensor | None, frequencies: Tensor | None, cursor: Tensor, recent: Tensor, center: Tensor,
    group: int,
) -> None:  # fmt: skip
    """Run `center.set_center` for rows whose first tokens enter the low-bit tier in this step. padding: uint8."""
    batch, heads, _, d = k.shape
    find_center[(batch * heads,)](
        k, padding, k if frequencies is None else frequencies, cursor, recent, center, k.stride()[:3],
        p_batch=0 if padding is None else padding.stride(0), heads=heads, columns=cursor.stride(0), d=d,
        rows=center.shape[2], turning=0 if frequencies is None else frequencies.shape[0], window=recent.shape[2],
        STEP=tokens_of_one(center.shape[2], group), CHANNELS=triton.next_power_of_2(d),
        BLOCK=TOKEN_BLOCK, num_warps=4,
    )  # fmt: skip


def share_of_center(q: Tensor, center: Tensor, cursor: Tensor, capacity: int, group: int, scale: float) -> Tensor:
    """Compute `center.share_of_center`: q [B, Hq, lanes, d] → [B, Hq, lanes, n], undefined after the low-bit tier.

    n: C, or for a stepped center at least C/g.
    """
    batch, query_heads, lanes, d = q.shape
    heads, step = center.shape[1], tokens_of_one(center.shape[2], group)
    if step > 1:
        capacity, group = triton.cdiv(capacity // group, STEPS.value) * STEPS.value, STEPS.value
    angle_rows = group + capacity // group
    shares = center.new_empty((batch, query_heads, lanes, capacity))
    angles = center.new_empty((batch, angle_rows, 2, d))
    write_angles[triton.cdiv(angle_rows, ANGLE_BLOCK), batch](
        center, cursor, angles, rows=angle_rows, heads=heads, columns=cursor.stride(0),
        d=d, group=group, center_rows=center.shape[2], STEP=step, CHANNELS=triton.next_power_of_2(d),
        BLOCK=ANGLE_BLOCK, num_warps=4,
    )  # fmt: skip
    rows = triton.next_power_of_2(query_heads // heads * lanes)
    groups = max(1, min(SUMS // group, MOST_ROWS) // rows)  # many share one table; their sums must fit in registers
    add_shares[batch * heads, triton.cdiv(capacity // group, groups)](
        q, center, angles, cursor, shares,
        q_batch=q.stride(0), q_head=q.stride(1), q_lane=q.stride(2), scale=scale, heads=heads, capacity=capacity,
        columns=cursor.stride(0), angle_rows=angle_rows, d=d, group=group, lanes=lanes, queries=query_heads // heads,
        center_rows=center.shape[2], STEP=step, GROUPS=groups, ROWS=rows, CHANNELS=CHANNEL_BLOCK, num_warps=4,
    )  # fmt: skip
    return shares
