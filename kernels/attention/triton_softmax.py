"""Triton: operations on logits that all attention kernels share."""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def shown(there, mask, at, MASK: tl.constexpr):
    """Return which tokens `there` [n] are visible under a mask of one row with columns `at` [n]: one load per token."""
    if MASK == 3:
        there = there & (tl.load(mask + at, there, 0) != 0)
    return there


@triton.jit
def biased(logits, mask, at, seen, MASK: tl.constexpr):
    """Apply the mask's columns `at` to logits; logits that are not `seen` become -inf."""
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
def finite(highest):
    """Return the maximum to subtract from logits: 0 if no logit is finite."""
    return tl.where(highest == float("-inf"), 0.0, highest)
