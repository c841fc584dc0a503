"""Triton: what every attention kernel does to its logits."""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def shown(there, mask, at, MASK: tl.constexpr):
    """Which of the tokens that are `there` [n] a mask of one row for all shows, whose columns are `at` [n]: a load for
    a token, and not for each of its logits."""
    if MASK == 3:
        there = there & (tl.load(mask + at, there, 0) != 0)
    return there


@triton.jit
def biased(logits, mask, at, seen, MASK: tl.constexpr):
    """Logits under the mask's columns `at`; what is not `seen` is -inf."""
    if MASK == 1:
        seen = seen & (tl.load(mask + at, seen, 0) != 0)
    if MASK == 2:
        logits += tl.load(mask + at, seen, 0.0).to(tl.float32)
    return tl.where(seen, logits, float("-inf"))


@triton.jit
def capped(logits, softcap, CAP: tl.constexpr):
    if CAP:  # tanh(x) = 2σ(2x) - 1
        logits = (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0) * softcap
    return logits


@triton.jit
def exponential(x):
    """exp(x) of x ≤ 0. `tl.exp` spends four instructions more on results below float32's smallest normal number, which
    are 0 here."""
    return tl.exp2(x * LOG2E)


@triton.jit
def finite(highest):
    """What logits can be taken down by: 0 for the highest of none."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def grown(logits, highest, peak, total):
    """One step of the running softmax, with each row's highest logit: weights, the shrinking of what was summed before,
    and the new peak and total."""
    higher = tl.maximum(peak, highest)
    base = finite(higher)
    weights = exponential(logits - base[:, None])
    shrink = exponential(peak - base)
    return weights, shrink, higher, total * shrink + tl.sum(weights, 1)
