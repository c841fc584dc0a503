"""Triton: a head's center is found, and its share of the logits computed; see `center`, which has the formulas.

Shapes as in `triton_decode`. Products are in float32 whatever torch is told of its own: a share is as large as the
biases that keys have, and must be what was taken off.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .center import BETA, GAMMA, MEAN_OF, PARTNER, ROWS, THETA
from .triton_cursor import AT_LENGTH, AT_LOW_BIT, AT_NEXT_LOW_BIT
from .triton_pairs import load_pairs

AT_BETA, AT_GAMMA, AT_THETA, AT_PARTNER = (tl.constexpr(row) for row in (BETA, GAMMA, THETA, PARTNER))
CENTER_ROWS, NEWEST = tl.constexpr(ROWS), tl.constexpr(MEAN_OF)
TOKEN_BLOCK, CHANNEL_BLOCK = 16, 32
FEWEST_ROWS = 8


@triton.jit(do_not_specialize=["heads"])
def find_center(
    # k [B, H, T, d]; padding [B, 1, 1, C] uint8, 0: not there; frequencies [turning]; cursor int64 [4]; recent
    # [B, H, W, 2, d]; written: center float32 [B, H, 4, d].
    k, padding, frequencies, cursor, recent, center,
    k_batch, k_head, k_token, p_batch, heads,
    d: tl.constexpr, turning: tl.constexpr, window: tl.constexpr, PADDED: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one head. Nothing to do but where the first tokens come into the low-bit tier.

    turning: half of the channels that RoPE turns. CHANNELS: d, padded. Bytes: 4·d a token of the newest `MEAN_OF`, from
    the cache the second time. FLOPs: some 60·d each, for sine and cosine.
    """
    bh = tl.program_id(0).to(tl.int64)
    length, stop = tl.load(cursor + AT_LENGTH), tl.load(cursor + AT_NEXT_LOW_BIT)
    if (tl.load(cursor + AT_LOW_BIT) > 0) | (stop == 0):
        return
    channel = tl.arange(0, CHANNELS)
    turns = channel < 2 * turning
    theta = tl.load(frequencies + channel % turning, turns, 0.0).to(tl.float32)
    first_half = channel < turning
    partner = tl.where(first_half, channel + turning, channel - turning)
    sign = tl.where(turns, tl.where(first_half, -1.0, 1.0), 0.0)
    partner = tl.where(turns, partner, 0)
    inside = (channel < d)[None, :]
    k_base = (bh // heads) * k_batch + (bh % heads) * k_head
    beta, gamma = tl.zeros([CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
    count = 0.0
    for start in range(tl.maximum(stop - NEWEST, 0), stop, BLOCK):
        token = start + tl.arange(0, BLOCK)
        there = token < stop
        if PADDED:
            there &= tl.load(padding + (bh // heads) * p_batch + token, there, 0) != 0
        mask = there[:, None] & inside
        x = load_pairs(
            k, recent, token[:, None], channel[None, :], mask,
            bh=bh, head_base=k_base, stride=k_token, length=length, WHICH=0, window=window, d=d, APART=False,
        )  # fmt: skip
        y = load_pairs(
            k, recent, token[:, None], partner[None, :], mask,
            bh=bh, head_base=k_base, stride=k_token, length=length, WHICH=0, window=window, d=d, APART=False,
        )  # fmt: skip
        finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), 1) != 0
        there &= finite
        x, y = tl.where(there[:, None], x, 0.0), tl.where(there[:, None], y * sign[None, :], 0.0)
        angle = token.to(tl.float32)[:, None] * theta[None, :]
        cos, sin = tl.cos(angle), tl.sin(angle)
        beta += tl.sum(x * cos - y * sin, 0)
        # A quarter turn on; what is not turned is not there.
        gamma += tl.sum(tl.where(turns[None, :], y * cos + x * sin, 0.0), 0)
        count += tl.sum(there.to(tl.float32), 0)
    count = tl.maximum(count, 1.0)
    row = center + bh * CENTER_ROWS * d + channel
    tl.store(row + AT_BETA * d, beta / count, channel < d)
    tl.store(row + AT_GAMMA * d, gamma / count, channel < d)
    tl.store(row + AT_THETA * d, theta, channel < d)
    tl.store(row + AT_PARTNER * d, sign * (partner + 1).to(tl.float32), channel < d)


@triton.jit
def load_group_center(center, bh, start, channel, inside, d: tl.constexpr):
    """The two factors of R(t)·β that are a group's, whose first token is `start`; and θ. Broadcast as `channel`."""
    row = center + bh * CENTER_ROWS * d + channel
    beta, gamma = tl.load(row + AT_BETA * d, inside, 0.0), tl.load(row + AT_GAMMA * d, inside, 0.0)
    theta = tl.load(row + AT_THETA * d, inside, 0.0)
    angle = start.to(tl.float32) * theta
    cos, sin = tl.cos(angle), tl.sin(angle)
    return cos * beta + sin * gamma, cos * gamma - sin * beta, theta


@triton.jit
def add_shares(
    # q [B, Hq, lanes, d]; center float32 [B, H, 4, d]; cosines and sines of a group's places [g, d]; cursor int64 [4].
    q, center, cosines, sines, cursor,
    # Written: shares float32 [B, Hq, lanes, C].
    shares,
    q_batch, q_head, q_lane, scale,
    # H, C in tokens.
    heads, capacity,
    d: tl.constexpr, group: tl.constexpr, lanes: tl.constexpr, queries: tl.constexpr, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """One program: one group of tokens of one KV head, for all its query heads and lanes.

    CHANNELS: those of one step of the product. Bytes: 8·d·g of the table, from the cache; written: 4·G·lanes a token.
    FLOPs: 4·G·lanes·d a token.
    """
    bh, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tile * group >= tl.load(cursor + AT_LOW_BIT):
        return
    batch, head = bh // heads, bh % heads
    row = tl.arange(0, ROWS)
    real = row < queries * lanes
    query_head, lane = head * queries + row // lanes, row % lanes
    q_row = q + batch * q_batch + query_head * q_head + lane * q_lane
    place = tl.arange(0, group)
    sums = tl.zeros([group, ROWS], tl.float32)
    for start in tl.static_range(0, d, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)
        inside = channel < d
        one, other, _ = load_group_center(center, bh, tile * group, channel, inside, d=d)
        query = tl.load(q_row[:, None] + channel[None, :], real[:, None] & inside[None, :], 0.0).to(tl.float32) * scale
        at, there = place[:, None] * d + channel[None, :], inside[None, :]
        cos, sin = tl.load(cosines + at, there, 0.0), tl.load(sines + at, there, 0.0)
        sums = tl.dot(cos, tl.trans(query * one[None, :]), sums, input_precision="ieee")
        sums = tl.dot(sin, tl.trans(query * other[None, :]), sums, input_precision="ieee")
    out = shares + ((batch * heads * queries + query_head) * lanes + lane) * capacity
    tl.store(out[None, :] + (tile * group + place)[:, None], sums, real[None, :])


def set_center(
    k: Tensor, padding: Tensor | None, frequencies: Tensor, cursor: Tensor, recent: Tensor, center: Tensor
) -> None:
    """As `center.set_center`, where this step's are the first tokens to come into the low-bit tier."""
    batch, heads, _, d = k.shape
    there = k if padding is None else padding.view(torch.uint8)
    find_center[(batch * heads,)](
        k, there, frequencies, cursor, recent, center, k_batch=k.stride(0), k_head=k.stride(1), k_token=k.stride(2),
        p_batch=there.stride(0), heads=heads, d=d, turning=frequencies.shape[0], window=recent.shape[2],
        PADDED=padding is not None, CHANNELS=triton.next_power_of_2(d), BLOCK=TOKEN_BLOCK, num_warps=4,
    )  # fmt: skip


def share_of_center(q: Tensor, center: Tensor, cursor: Tensor, capacity: int, group: int, scale: float) -> Tensor:
    """As `center.share_of_center`: [B, Hq, lanes, C] of q [B, Hq, lanes, d]; beyond the low-bit tier anything."""
    batch, query_heads, lanes, d = q.shape
    heads = center.shape[1]
    shares = torch.empty((batch, query_heads, lanes, capacity), dtype=torch.float32, device=q.device)
    place = torch.arange(group, dtype=torch.float32, device=q.device)[:, None] * center[0, 0, THETA]
    rows = query_heads // heads * lanes
    add_shares[batch * heads, capacity // group](
        q, center, place.cos(), place.sin(), cursor, shares,
        q_batch=q.stride(0), q_head=q.stride(1), q_lane=q.stride(2), scale=scale, heads=heads, capacity=capacity,
        d=d, group=group, lanes=lanes, queries=query_heads // heads,
        ROWS=max(FEWEST_ROWS, triton.next_power_of_2(rows)), CHANNELS=CHANNEL_BLOCK, num_warps=4,
    )  # fmt: skip
    return shares
