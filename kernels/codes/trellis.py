"""Trellis-coded quantisation of a vector at one bit a number (Marcellin and Fischer, IEEE Trans. Commun. 38, 1990),
with Ungerboeck's code of eight states (IEEE Trans. Inf. Theory 28, 1982, Table I: parity checks 13 and 4).

A number's level is one of four, a step apart, as a code of two bits has them. Its own bit and the three before it say
which, so that one bit a number chooses between two of them:

    q_t = 2·(b_t ⊕ b_(t-1) ⊕ b_(t-3)) + b_(t-2)        x_t ≈ s·(q_t - 3/2)

The bits go round: those before the first are the last (tail-biting), in circles of 32 numbers where these divide a
vector. One s a vector, s = x·x / r·x for r_t = q_t - 3/2, makes the code unbiased: errors of many tokens add up to no
shrinkage.

Of Gaussian numbers one bit leaves .36 of the variance by two levels, .31 by this code, .25 by any (Shannon).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from specache_compile.kernels.codes.quantize import unpack

# Numbers [n, t] of unit step, t whole bytes → codes, uint8 [n, t / 8].
Encoder = Callable[[Tensor], Tensor]

MEMORY = 3
STATES = 1 << MEMORY
# Numbers of a circle where they divide a vector: its bits are one word of a GPU. 64 leave a hundredth less of the
# variance. And the most elsewhere.
CIRCLE, LARGEST_CIRCLE = 32, 64
# Of Gaussian numbers of unit variance, what the distance of levels should be.
STEP = 0.8
# The least cosine of a vector and its levels that counts; a Gaussian vector's is 0.83.
LEAST_COSINE = 0.25


def circle_of(head_dim: int) -> int:
    """Numbers of a circle: `CIRCLE`, or the most whole bytes of bits, up to `LARGEST_CIRCLE`, that divide a vector."""
    if head_dim % CIRCLE == 0:
        return CIRCLE
    width = head_dim // 8
    return 8 * next(size for size in range(min(width, LARGEST_CIRCLE // 8), 0, -1) if width % size == 0)


def is_trellis(params: Tensor) -> bool:
    """Whether keys or values of these parameters are in the trellis code: a scale and no zero point."""
    return params.shape[3] == 1


def levels_of(window: Tensor) -> Tensor:
    """q of four bits each: b_t is the lowest, b_(t-3) the highest; int64."""
    return 2 * ((window ^ (window >> 1) ^ (window >> 3)) & 1) + (window >> 2 & 1)


def in_steps(x: Tensor) -> Tensor:
    """Vectors [..., d] as the code walks them: bit p of byte j, which is channel p·d/8 + j (`quantize.pack`), behind
    its bit p - 1, and behind all of byte j - 1."""
    return x.unflatten(-1, (8, -1)).mT.flatten(-2)


def nearest_paths(circles: Tensor) -> Tensor:
    """The bits of numbers [n, t] of unit step, uint8 [n, t], whose levels are nearest (Viterbi, 1967).

    A path that goes round must end in the state in which it began. That state is found first, by a walk from half way
    round to half way round, which has read as much before the path's beginning as behind it. The path is not always the
    nearest of all that go round.
    """
    half = circles.shape[1] // 2
    free = circles.new_zeros(circles.shape[0], STATES)
    costs, choices = walked(circles.roll(half, 1), free)
    _, edge = followed(choices[half:], costs.argmin(1, keepdim=True))
    costs, choices = walked(circles, torch.full_like(free, math.inf).scatter_(1, edge, 0.0))
    bits, _ = followed(choices, edge)
    return bits


def followed(choices: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """The bits of the nearest path to each end `state` [n, 1], and where it began."""
    bits = []
    for second in reversed(choices):
        bits.append((state & 1).to(torch.uint8))
        state = state >> 1 | second.gather(1, state).long() << MEMORY - 1
    return torch.cat(bits[::-1], 1), state


def walked(circles: Tensor, costs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The costs [n, STATES] to end in each state, from those to begin there; and each step's choices.

    A choice says, for each state, which of the two states before was the nearer. A state's bits are the last three, the
    newest lowest.
    """
    state = torch.arange(STATES, device=circles.device)
    before = torch.stack([state >> 1, state >> 1 | STATES >> 1])
    window = torch.stack([state, state | STATES])
    levels = levels_of(window) - 1.5
    squares = levels * levels / 2
    choices = []
    for x in circles.unbind(1):
        # Half the squared distance, without what all levels have in common.
        apart = squares - x[:, None, None] * levels
        first, second = (costs[:, before] + apart).unbind(1)
        choices.append(second < first)
        costs = torch.minimum(first, second)
    return costs, choices


def encode(circles: Tensor) -> Tensor:
    """Numbers [n, t] of unit step, t whole bytes → their codes, uint8 [n, t / 8]: the first bit is a byte's lowest."""
    places = torch.arange(8, dtype=torch.uint8, device=circles.device)
    return (nearest_paths(circles).unflatten(1, (-1, 8)) << places).sum(-1, dtype=torch.uint8)


def expanded(codes: Tensor) -> Tensor:
    """Codes [..., d / 8] → what they stand for as codes of two bits, uint8 [..., d / 4], packed as `quantize.pack`
    packs them: the even bits of all bytes, and behind them the odd ones."""
    codes = codes.unflatten(-1, (-1, circle_of(8 * codes.shape[-1]) // 8)).int()
    window = (codes << MEMORY | codes.roll(1, -1) >> 8 - MEMORY).flatten(-2)
    high, low = window >> 3 ^ window >> 2 ^ window, window >> 1
    return torch.cat([(high >> odd & 0x55) << 1 | low >> odd & 0x55 for odd in (0, 1)], -1).to(torch.uint8)


def quantize(values: Tensor, encode: Encoder = encode) -> tuple[Tensor, Tensor]:
    """Values [B, H, T, d] → codes uint8 [B, H, T, d / 8], and the scale [B, H, T, 1, 1] of each, float32. What is not
    finite counts as 0."""
    exact = values.float()
    exact = exact.masked_fill(~exact.isfinite(), 0.0)
    peak = exact.abs().amax(-1, keepdim=True)
    x = torch.where(peak > 0, exact / peak, 0.0)  # squares of what is large are no numbers
    circle, square = circle_of(x.shape[-1]), (x * x).sum(-1, keepdim=True)
    step = (square / x.shape[-1]).sqrt() * STEP
    steps = in_steps(torch.where(step > 0, x / step, 0.0))
    codes = encode(steps.reshape(-1, circle)).view(*x.shape[:-1], x.shape[-1] // 8)
    return codes, unbiased(x, unpack(expanded(codes), 2) - 1.5, square, peak).unsqueeze(-1)


def unbiased(x: Tensor, levels: Tensor, square: Tensor, peak: Tensor) -> Tensor:
    """peak · x·x / r·x [..., 1] of x and levels r [..., d]; square: x·x."""
    least = LEAST_COSINE * (square * (levels * levels).sum(-1, keepdim=True)).sqrt()
    along = torch.maximum((x * levels).sum(-1, keepdim=True), least)
    return torch.where(square > 0, peak * (square / along), 0.0)


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """s·(q - 3/2) in float32: codes [B, H, T, d / 8], scale [B, H, T, 1, 1] → [B, H, T, d]."""
    return (unpack(expanded(codes), 2) - 1.5) * scale[..., 0]
