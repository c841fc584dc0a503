"""Triton: the levels of a group, as in `quantize.py`, scale and zero point, as in `params.py`, and e4m3 codes."""

from __future__ import annotations

import triton
import triton.language as tl

from . import params, quantize

DROPPED, HALF = tl.constexpr(params.DROPPED), tl.constexpr(1 << params.DROPPED - 1)
EIGHTHS, EIGHTH = tl.constexpr(params.EIGHTHS), tl.constexpr(1 / params.EIGHTHS)
FARTHEST, LARGEST_SCALE = tl.constexpr(params.FARTHEST), tl.constexpr(params.LARGEST_SCALE)
LARGEST = tl.constexpr(quantize.LARGEST)
# x + ROUND - ROUND rounds |x| < 2**22 to the nearest integer, ties to even, as `torch.round` does.
ROUND = tl.constexpr(12582912.0)


@triton.jit
def finite_range(x, seen, axis: tl.constexpr):
    """Return smallest and largest finite element along `axis` (size 1 in the results), 0 if there is none."""
    finite = seen & (tl.abs(x) < float("inf"))  # false for NaN
    low = tl.min(tl.where(finite, x, float("inf")), axis, keep_dims=True)
    high = tl.max(tl.where(finite, x, float("-inf")), axis, keep_dims=True)
    empty = low > high
    low = tl.where(empty, 0.0, tl.minimum(tl.maximum(low, -LARGEST), LARGEST))
    high = tl.where(empty, 0.0, tl.minimum(tl.maximum(high, -LARGEST), LARGEST))
    return low, high


@triton.jit
def scale_and_zero(low, high, bits: tl.constexpr, zero_point: tl.constexpr):
    """Compute the quantisers of `QUANTISERS`."""
    spread = high - low
    if zero_point == "middles" or (zero_point == "midpoint" and bits == 1):
        scale = spread * (1.0 / (1 << bits))
        zero = low + scale * 0.5
    else:
        scale, zero = tl.div_rn(spread, tl.zeros_like(spread) + ((1 << bits) - 1)), low
    return scale, zero


@triton.jit
def rounded(x, least: tl.constexpr, most: tl.constexpr):
    """Round x to the nearest integer from `least` to `most`, int32; NaN to 0."""
    x = tl.where(x == x, x, 0.0)
    return ((tl.minimum(tl.maximum(x, least), most) + ROUND) - ROUND).to(tl.int32)


@triton.jit
def stored_scale(scale, limit, kind: tl.constexpr):
    """Compute `params.stored_scale`. limit: the largest number of `kind`, if scales do not have 8 bits."""
    if kind == tl.uint8:
        halves = tl.minimum(scale, LARGEST_SCALE).to(tl.float16).to(tl.int16, bitcast=True)
        stored = ((halves + HALF) >> DROPPED).to(tl.uint8)
    else:
        stored = tl.minimum(scale, limit).to(kind)
    return stored


@triton.jit
def read_scale(stored):
    """Compute `params.read_scale`."""
    if stored.dtype == tl.uint8:
        scale = (stored.to(tl.int16) << DROPPED).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        scale = stored.to(tl.float32)
    return scale


@triton.jit
def stored_params(scale, zero, limit, kind: tl.constexpr):
    """Compute `params.stored_params`."""
    if kind == tl.uint8:
        farthest = tl.zeros_like(zero) + FARTHEST
        stored = stored_scale(tl.maximum(scale, tl.div_rn(tl.abs(zero), farthest)), limit, kind)
        eighths = rounded(tl.div_rn(zero, read_scale(stored)) * EIGHTHS, -128, 127)
        zero_point = eighths.to(tl.int8).to(tl.uint8, bitcast=True)
    else:
        stored = stored_scale(scale, limit, kind)
        zero_point = tl.minimum(tl.maximum(zero, -limit), limit).to(kind)
    return stored, zero_point


@triton.jit
def read_zero(stored, scale):
    """Compute the zero point of `params.read_params` with a known scale."""
    if stored.dtype == tl.uint8:
        zero = stored.to(tl.int8, bitcast=True).to(tl.float32) * EIGHTH * scale
    else:
        zero = stored.to(tl.float32)
    return zero


@triton.jit
def quantized(x, seen, axis: tl.constexpr, bits: tl.constexpr, zero_point: tl.constexpr, limit, kind: tl.constexpr):
    """Compute `quantize.encode`: int32 levels, and stored scale and zero point, of groups along `axis`.

    seen: mask of the numbers that count in their group's range. limit, kind: as in `stored_scale`.
    """
    low, high = finite_range(x, seen, axis)
    scale, zero = scale_and_zero(low, high, bits, zero_point)
    scale, zero = stored_params(scale, zero, limit, kind)
    step = read_scale(scale)
    # NaN becomes the smallest level.
    levels = rounded(tl.div_rn(x - read_zero(zero, step), tl.zeros_like(x) + step), 0, (1 << bits) - 1)
    return levels, scale, zero


@triton.jit
def from_e4m3(codes, TYPED: tl.constexpr):
    """Convert e4m3 codes uint8 to float16, exactly. TYPED: the device has such a type."""
    if TYPED:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        signed = codes.to(tl.int8, bitcast=True).to(tl.int16)
        numbers = ((signed << 7) & ~0x4000).to(tl.float16, bitcast=True) * 256.0
        numbers = tl.where((codes & 0x7F) == 0x7F, float("nan"), numbers)
    return numbers
