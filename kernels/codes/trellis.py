"""Trellis-coded quantisation of a vector at one bit per number (Marcellin and Fischer, IEEE Trans. Commun. 38, 1990).

It uses Ungerboeck's code of eight states (IEEE Trans. Inf. Theory 28, 1982, Table I: parity checks 13 and 4).
"""

# A number's level is one of four levels of a 2-bit code, which its bit and the three bits before it select:
#     q_t = 2·(b_t ⊕ b_(t-1) ⊕ b_(t-3)) + b_(t-2)        x_t ≈ s·(q_t - 3/2)
# The bits are circular (tail-biting): the last bits precede the first, in circles of 32 numbers. A circle is one word
# (`records.py`), which may hold channels of several vectors; 64 numbers would leave a hundredth less variance. Each
# vector has one scale s = x·x / r·x with r_t = q_t - 3/2. This makes the code unbiased: errors of many tokens do not
# add up to shrinkage.
#
# For Gaussian numbers at one bit, two levels leave .36 of the variance, this code .31, and any code at least .25
# (Shannon).

from __future__ import annotations

import math

import torch
from torch import Tensor

from specache_compile.kernels.cpp.library import has_compiler, tiers_library

from .records import CIRCLE, RECORD, by_field, by_token, fields_of, order_of, packed, unpacked

MEMORY = 3
STATES = 1 << MEMORY
# Optimal distance of levels for Gaussian numbers of unit variance.
STEP = 0.8
# Lower bound for the cosine of a vector and its levels; a Gaussian vector has 0.83.
LEAST_COSINE = 0.25


def is_trellis(params: Tensor) -> bool:
    """Return whether keys or values with these parameters are in the trellis code: a scale and no zero point."""
    return params.shape[3] == 1


def levels_of(window: Tensor) -> Tensor:
    """Return q of windows of four bits, in which b_t is the lowest and b_(t-3) the highest; int64."""
    return 2 * ((window ^ (window >> 1) ^ (window >> 3)) & 1) + (window >> 2 & 1)


def encode(circles: Tensor) -> Tensor:
    """Encode numbers [n, t] of unit step, t whole bytes, as bits uint8 [n, t / 8] with the nearest levels (Viterbi,
    1967); the first bit is a byte's lowest.

    A circular path must end in its start state. A first walk from half a circle to half a circle determines that state,
    since it reads equally much before and after the start. The result is not always the nearest circular path.
    """
    half = circles.shape[1] // 2
    free = circles.new_zeros(circles.shape[0], STATES)
    costs, choices = walked(circles.roll(half, 1), free)
    _, edge = followed(choices[half:], costs.argmin(1, keepdim=True))
    costs, choices = walked(circles, torch.full_like(free, math.inf).scatter_(1, edge, 0.0))
    bits, _ = followed(choices, edge)
    return packed(bits, 1)


def followed(choices: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bits of the nearest path to each end `state` [n, 1], and its start state."""
    bits = []
    for second in reversed(choices):
        bits.append((state & 1).to(torch.uint8))
        state = state >> 1 | second.gather(1, state).long() << MEMORY - 1
    return torch.cat(bits[::-1], 1), state


def walked(circles: Tensor, costs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the costs [n, STATES] to end in each state, given the costs to start there, and each step's choices.

    A choice is True for each state whose second predecessor was nearer. A state is the last three bits, newest lowest.
    """
    state = torch.arange(STATES, device=circles.device)
    before = torch.stack([state >> 1, state >> 1 | STATES >> 1])
    window = torch.stack([state, state | STATES])
    levels = levels_of(window) - 1.5
    squares = levels * levels / 2
    choices = []
    for x in circles.unbind(1):
        # Half the squared distance, without the term that all levels share.
        apart = squares - x[:, None, None] * levels
        first, second = (costs[:, before] + apart).unbind(1)
        choices.append(second < first)
        costs = torch.minimum(first, second)
    return costs, choices


def expanded(bits: Tensor) -> Tensor:
    """Return the 2-bit levels q, uint8, of the bits uint8 [..., 32 · n] of circles."""
    circles = bits.unflatten(-1, (-1, CIRCLE))
    before, second, third = (circles.roll(by, -1) for by in range(1, MEMORY + 1))
    return (2 * (circles ^ before ^ third) + second).flatten(-2)


def levels_of_bits(bits: Tensor, dim: int, values: bool) -> Tensor:
    """Return the levels q, uint8 [B, H, 64 · n, D], of n records' bits [B, H, n, 64 · D] in the order of memory."""
    return by_token(expanded(bits), dim, 1, values)


def read_levels(codes: Tensor, dim: int, values: bool) -> Tensor:
    """Return the levels uint8 [B, H, C, D] of whole records' keys or values, codes [B, H, C, w]."""
    return levels_of_bits(fields_of(codes, dim, 1, values), dim, values)


def quantize(x: Tensor, start: int, dim: int, values: bool) -> tuple[Tensor, Tensor]:
    """Quantise keys or values [B, H, T, d] of tokens from `start` on; elements that are not finite count as 0.

    Args:
        dim: D, the stored channels; the others are 0.
        values: whether x is values, whose circles hold other channels than the keys'.

    Returns: the n records with these tokens, uint8 [B, H, n, 8 · D] as in memory, and scales float32 [B, H, T].
    """
    first = start % RECORD
    whole = (0, dim - x.shape[3], first, -(start + x.shape[2]) % RECORD)
    records = torch.nn.functional.pad(x.float().nan_to_num(0.0, 0.0, 0.0), whole)
    run = quantize_fused if x.device.type == "cpu" and has_compiler() else quantize_records
    codes, scale = run(records, x.shape[3], values)
    return codes, scale[:, :, first : first + x.shape[2]]


def quantize_records(x: Tensor, head_dim: int, values: bool) -> tuple[Tensor, Tensor]:
    """Quantise whole records [B, H, 64 · n, D], 0 from channel `head_dim` on.

    Returns: codes uint8 [B, H, n, 8 · D], and scales float32 [B, H, 64 · n].
    """
    peak = x.abs().amax(-1, keepdim=True)
    unit = torch.where(peak > 0, x / peak, 0.0)  # squares of large numbers overflow
    square = (unit * unit).sum(-1, keepdim=True)
    step = (square / head_dim).sqrt() * STEP
    fields = by_field(torch.where(step > 0, unit / step, 0.0), 0, 1, values)
    codes = encode(fields.reshape(-1, CIRCLE)).view(*fields.shape[:3], 8 * x.shape[3])
    levels = levels_of_bits(unpacked(codes, 1), x.shape[3], values)[..., :head_dim].float() - 1.5
    least = LEAST_COSINE * (square * (levels * levels).sum(-1, keepdim=True)).sqrt()
    along = torch.maximum((unit[..., :head_dim] * levels).sum(-1, keepdim=True), least)
    return codes, torch.where(square > 0, peak * (square / along), 0.0)[..., 0]


def quantize_fused(x: Tensor, head_dim: int, values: bool) -> tuple[Tensor, Tensor]:
    """Compute `quantize_records` in C++: the definition reads and writes each number about thirty times.

    Paths that are equally near up to rounding may differ.
    """
    x, dim, count = x.contiguous(), x.shape[3], x.numel() // (RECORD * x.shape[3])
    codes = x.new_empty((*x.shape[:2], x.shape[2] // RECORD, 8 * dim), dtype=torch.uint8)
    scale, order = x.new_empty(x.shape[:3]), order_of(dim, 1, values)
    places = (order.data_ptr(), codes.data_ptr(), scale.data_ptr())
    tiers_library().quantize(x.data_ptr(), count, dim, head_dim, *places)
    return codes, scale


def dequantize(levels: Tensor, scale: Tensor) -> Tensor:
    """Return s·(q - 3/2) in float32 [B, H, T, d], from levels q [B, H, T, d] and scale [B, H, T]."""
    return (levels - 1.5) * scale[..., None]
