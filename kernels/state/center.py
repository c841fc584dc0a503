"""The center of a head's keys: the mean that they have before RoPE, which is taken off before they are quantised.

A key of token t is R(t)·x, with RoPE's rotation R(t). What all x have in common (a bias of the key projection, above
all) R spreads over a group's tokens as a wave, which widens the range of every channel; as R(t)·β it can be taken off
each key, and q·R(t)·β be added to the logit again. Any β will do: a poor one costs precision, never correctness. So t
is the number of the token in the cache, whatever position p the model gives it: R(p - t)·x has a mean too.

A state tensor `center` float32 [B, H, 4, d] holds what is needed to turn it, a row each:

    β           the mean
    γ           β a quarter turn on, so that R(t)·β = cos(t·θ)·β + sin(t·θ)·γ
    θ           RoPE's frequency of each channel, in radians a token; 0: not turned
    partner     the channel that each is turned with, counted from 1, and its sign; 0: none

Keys in the trellis code have no zero points, which elsewhere hold most of a group's mean. Their center is *stepped*:
the mean of R(t)·β over a group's tokens, so that a group has one share. It has the first three rows. θ is then the
angle from one group to the next, and β the first group's mean. Where RoPE's frequencies are not known, θ and γ are 0,
and β is the keys' plain mean.

Zeros mean that there is none. Angles are the sum of a group's first token's and of the place in the group, everywhere:
what is taken off must be what is added, to the last bits of large biases.
"""

from __future__ import annotations

import torch
from torch import Tensor

BETA, GAMMA, THETA, PARTNER = range(4)
ROWS = 4
# Rows of a center that is the same for the tokens of a group.
STEPPED = 3
# Tokens that the mean is taken of: the last of those that are the first to come into the tier.
MEAN_OF = 1024


def partners(frequencies: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """θ and the signed partner of each channel, float32 [d], from RoPE's frequencies [h]: channels j and j + h turn
    together (as GPT-NeoX's and Llama's do), those from 2·h on do not turn."""
    turning = frequencies.shape[0]
    theta = torch.zeros(head_dim, dtype=torch.float32, device=frequencies.device)
    partner = torch.zeros_like(theta)
    channel = torch.arange(1, turning + 1, dtype=torch.float32, device=frequencies.device)
    theta[:turning] = theta[turning : 2 * turning] = frequencies.float()
    partner[:turning], partner[turning : 2 * turning] = -(channel + turning), channel
    return theta, partner


def quarter_turn(x: Tensor, partner: Tensor) -> Tensor:
    """x [..., d], each channel its partner's with its sign."""
    return x[..., (partner.abs().long() - 1).clamp_min(0)] * partner.sign()


def is_found(center: Tensor, frequencies: Tensor | None, in_trellis: bool) -> bool:
    """Whether a tier's keys get a center: those in the trellis always, others where RoPE's frequencies are known."""
    return center.shape[2] > 0 and (in_trellis or frequencies is not None)


def set_center(keys: Tensor, there: Tensor | None, frequencies: Tensor | None, center: Tensor, group: int) -> None:
    """Write `center` for a tier whose first keys are to be these [B, H, T, d], of the tokens 0 to T - 1.

    there: bool [B, 1, T, 1], the tokens that count; None: all. What is not finite does not.
    frequencies: RoPE's; None: nothing turns.
    group: tokens of a group.
    """
    if frequencies is None:
        frequencies = keys.new_zeros(0)
    theta, partner = partners(frequencies, keys.shape[-1])
    first = max(0, keys.shape[2] - MEAN_OF)
    keys = keys[:, :, first:].float()
    counts = keys.isfinite().all(-1, keepdim=True)
    counts = counts if there is None else counts & there[:, :, first:]
    keys = keys.masked_fill(~counts, 0.0)
    tokens = torch.arange(first, first + keys.shape[2], dtype=torch.float32, device=keys.device)
    angle = tokens[:, None] * theta
    turned = keys * angle.cos() - quarter_turn(keys, partner) * angle.sin()
    mean = turned.sum(2) / counts.sum(2).clamp_min(1)
    if center.shape[2] == STEPPED:
        angle = torch.arange(group, dtype=torch.float32, device=keys.device)[:, None] * theta
        mean = angle.cos().mean(0) * mean + angle.sin().mean(0) * quarter_turn(mean, partner)
        theta = theta * group
    rows = torch.stack([mean, quarter_turn(mean, partner), theta.expand_as(mean), partner.expand_as(mean)], 2)
    center[...] = rows[:, :, : center.shape[2]]


def waves(center: Tensor, group: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
    """R(t)·β of the tokens of the groups first..stop, in two factors.

    The groups' is float32 [B, H, n, 2·d], that of the places in a group [B, 1, g, 2·d], alike in all heads. Their
    product has two halves of d channels, whose sum is R(t)·β.
    """
    beta, gamma = center[:, :, BETA, None], center[:, :, GAMMA, None]
    theta = center[:, :1, THETA, None]
    start = torch.arange(first * group, stop * group, group, dtype=torch.float32, device=center.device)[:, None] * theta
    place = torch.arange(group, dtype=torch.float32, device=center.device)[:, None] * theta
    cos, sin = start.cos(), start.sin()
    groups = torch.cat([cos * beta + sin * gamma, cos * gamma - sin * beta], -1)
    return groups, torch.cat([place.cos(), place.sin()], -1)


def tokens_of_one(rows: int, group: int) -> int:
    """How many tokens have one center of so many rows, and one share."""
    return group if rows == STEPPED else 1


def steps(center: Tensor, first: int, stop: int) -> Tensor:
    """A stepped center's [B, H, n, d] of the groups first..stop."""
    return waves(center, 1, first, stop)[0][..., : center.shape[-1]]


def centers(center: Tensor, group: int, first: int, stop: int) -> Tensor:
    """What is taken off the keys [B, H, (stop - first)·g, d] of the groups first..stop."""
    if center.shape[2] == STEPPED:
        return steps(center, first, stop).repeat_interleave(group, 2)
    groups, places = waves(center, group, first, stop)
    both = groups.unsqueeze(3) * places.unsqueeze(2)
    return both.unflatten(-1, (2, -1)).sum(-2).flatten(2, 3)


def share_of_center(query: Tensor, center: Tensor, group: int, length: int) -> Tensor:
    """q·R(t)·β [B, H, G, lanes, length] of the scaled query [B, H, G, lanes, d], in float32: what the logits of the
    first `length` tokens, whole groups, lack.

    FLOPs: 4·d a token and query row, as a product with a table of one group's places; of a stepped center a group.
    """
    if center.shape[2] == STEPPED:
        return share_of_groups(query, center, length // group).repeat_interleave(group, -1)
    groups, places = waves(center, group, 0, length // group)
    rows = query.flatten(2, 3).repeat(1, 1, 1, 2)
    shares = (rows.unsqueeze(3) * groups.unsqueeze(2)).flatten(2, 3) @ places.mT
    return shares.view(*query.shape[:4], length)


def share_of_groups(query: Tensor, center: Tensor, groups: int) -> Tensor:
    """`share_of_center` of a stepped center, once for each of the first groups [B, H, G, lanes, groups]."""
    beta, gamma = center[:, :, BETA, None], center[:, :, GAMMA, None]
    angle = center[:, :1, THETA, :, None] * torch.arange(groups, dtype=torch.float32, device=center.device)
    rows = query.flatten(2, 3)
    return ((rows * beta) @ angle.cos() + (rows * gamma) @ angle.sin()).view(*query.shape[:4], groups)
