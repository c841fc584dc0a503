"""The center of a head's keys: the keys' mean before RoPE, which is subtracted before quantisation.

A key of token t is R(t)·x, with RoPE's rotation R(t). R turns the mean β of all x (mainly the key projection's bias)
into a wave over a group's tokens, which widens every channel's range. So R(t)·β is subtracted from each key, and
q·R(t)·β is added to its logit. The comment below has the layout.
"""

# Any β is correct; a poor one costs precision. So t is the token's index in the cache, whatever its position p in the
# model: R(p - t)·x has a mean too.
#
# The state tensor `center` float32 [B, H, 4, d] has the rows
#     β           the mean
#     γ           β after a quarter turn, so that R(t)·β = cos(t·θ)·β + sin(t·θ)·γ
#     θ           RoPE's frequency of each channel, in radians per token; 0: not rotated
#     partner     the channel that each rotates with, counted from 1, and its sign; 0: none
# All zeros mean that there is no center.
#
# Keys in the trellis code have no zero points, which elsewhere hold most of a group's mean. Their center is *stepped*:
# the mean of R(t)·β over a group's tokens, one share per group. It has the first three rows, with θ the angle from
# group to group and β the first group's mean. If RoPE's frequencies are unknown, θ and γ are 0 and β is the plain mean.
#
# All code computes an angle as the group's first angle plus the angle in the group: the subtracted wave must equal the
# added one, to the last bits of large biases.

from __future__ import annotations

import torch
from torch import Tensor

BETA, GAMMA, THETA, PARTNER = range(4)
ROWS = 4
# Rows of a stepped center.
STEPPED = 3
# Number of tokens for the mean: the last of the first tokens that enter the tier.
MEAN_OF = 1024


def partners(frequencies: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return θ and the signed partner of each channel, float32 [d], from RoPE's frequencies [h].

    Channels j and j + h rotate together, as in GPT-NeoX and Llama; channels from 2·h on do not rotate.
    """
    turning = frequencies.shape[0]
    theta = torch.zeros(head_dim, dtype=torch.float32, device=frequencies.device)
    partner = torch.zeros_like(theta)
    channel = torch.arange(1, turning + 1, dtype=torch.float32, device=frequencies.device)
    theta[:turning] = theta[turning : 2 * turning] = frequencies.float()
    partner[:turning], partner[turning : 2 * turning] = -(channel + turning), channel
    return theta, partner


def quarter_turn(x: Tensor, partner: Tensor) -> Tensor:
    """Return x [..., d] with each channel replaced by its signed partner."""
    return x[..., (partner.abs().long() - 1).clamp_min(0)] * partner.sign()


def is_found(center: Tensor, frequencies: Tensor | None, in_trellis: bool) -> bool:
    """Return whether a tier's keys get a center: always in the trellis code, else if RoPE's frequencies are known."""
    return center.shape[2] > 0 and (in_trellis or frequencies is not None)


def set_center(keys: Tensor, there: Tensor | None, frequencies: Tensor | None, center: Tensor, group: int) -> None:
    """Write `center` for a tier from its first keys [B, H, T, d], tokens 0 to T - 1, without non-finite elements.

    Args:
        there: bool [B, 1, T, 1], True for real tokens; None without padding.
        frequencies: RoPE's frequencies; None if no channel rotates.
        group: number of tokens in a group.
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
    """Return R(t)·β for the groups first..stop as two factors, float32.

    The factor of groups is [B, H, n, 2·d], the factor of positions in a group [B, 1, g, 2·d], equal for all heads. The
    two halves of d channels of their product add up to R(t)·β.
    """
    beta, gamma = center[:, :, BETA, None], center[:, :, GAMMA, None]
    theta = center[:, :1, THETA, None]
    start = torch.arange(first * group, stop * group, group, dtype=torch.float32, device=center.device)[:, None] * theta
    place = torch.arange(group, dtype=torch.float32, device=center.device)[:, None] * theta
    cos, sin = start.cos(), start.sin()
    groups = torch.cat([cos * beta + sin * gamma, cos * gamma - sin * beta], -1)
    return groups, torch.cat([place.cos(), place.sin()], -1)


def tokens_of_one(rows: int, group: int) -> int:
    """Return the number of tokens that share one center, and one share, for a center of this many rows."""
    return group if rows == STEPPED else 1


def centers(center: Tensor, group: int, first: int, stop: int) -> Tensor:
    """Return the centers of the keys of the groups first..stop, [B, H, (stop - first)·g, d]."""
    if center.shape[2] == STEPPED:
        return waves(center, 1, first, stop)[0][..., : center.shape[-1]].repeat_interleave(group, 2)
    groups, places = waves(center, group, first, stop)
    both = groups.unsqueeze(3) * places.unsqueeze(2)
    return both.unflatten(-1, (2, -1)).sum(-2).flatten(2, 3)


def share_of_center(query: Tensor, center: Tensor, group: int, length: int) -> Tensor:
    """Return q·R(t)·β for a scaled query [B, H, G, lanes, d]: the center's part of the logits.

    The result is float32 [B, H, G, lanes, n], for the first `length` tokens, whole groups, or one share for each group
    of them with a stepped center (`tokens_of_one`).

    FLOPs: 4·d per share and query row (a product with a table of one group).
    """
    rows, groups = query.flatten(2, 3), length // group
    if center.shape[2] == STEPPED:
        beta, gamma = center[:, :, BETA, None], center[:, :, GAMMA, None]
        angle = center[:, :1, THETA, :, None] * torch.arange(groups, dtype=torch.float32, device=center.device)
        shares = (rows * beta) @ angle.cos() + (rows * gamma) @ angle.sin()
    else:
        first, places = waves(center, group, 0, groups)
        shares = (rows.repeat(1, 1, 1, 2).unsqueeze(3) * first.unsqueeze(2)).flatten(2, 3) @ places.mT
    return shares.view(*query.shape[:4], length // tokens_of_one(center.shape[2], group))
