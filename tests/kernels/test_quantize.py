"""Quantisation against the papers' formulas, in float64 and element by element.

Every accuracy test uses one bound: half a step, plus rounding errors of the stored scale (times the level) and zero.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specache_compile.kernels.codes.quantize import CHANNELS, TOKENS, dequantize, encode, quantize

pytestmark = pytest.mark.pairwise

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = [(1, "midpoint"), (1, "minimum"), (2, "midpoint"), (4, "minimum"), (8, "minimum")]
GROUPS = (32, 64, 128)
HEAD_DIMS = (16, 64, 80, 96, 128)
PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)


def formula(low: float, high: float, bits: int, zero_point: str) -> tuple[float, float]:
    """Return scale and zero of a group with this minimum and maximum, by the papers' formulas."""
    if bits == 1 and zero_point == "midpoint":
        return (high - low) / 2, (3 * low + high) / 4
    return (high - low) / (2**bits - 1), low


def bound(low: Tensor, high: Tensor, bits: int, zero_point: str, dtype: torch.dtype) -> Tensor:
    """Return the bound of |x - x'|: s/2, plus the rounding of s and z to `dtype` and of the arithmetic to float32."""
    scale, zero = formula(low.double(), high.double(), bits, zero_point)
    stored, computed = torch.finfo(dtype), torch.finfo(torch.float32)
    loss = stored.eps / 2 * (scale * (2**bits - 1) + zero.abs()) + stored.smallest_normal * stored.eps * 2**bits
    arithmetic = 8 * computed.eps * torch.maximum(low.abs(), high.abs()).double() + computed.smallest_normal
    return scale / 2 + loss + arithmetic


def channels_of(head_dim: int, group_size: int) -> int:
    """Return the largest number of channels of at most a group that divides a head."""
    return next(size for size in range(group_size, 0, -1) if head_dim % size == 0)


def round_trip(x: Tensor, dim: int, bits: int, zero_point: str) -> Tensor:
    """Quantise over groups of 32 tokens, or of at most as many channels."""
    size = channels_of(x.shape[-1], 32) if dim == CHANNELS else 32
    return dequantize(*quantize(x, dim, size, bits, zero_point, x.dtype), dim)


def pairs(tokens: int, head_dim: int, dtype: torch.dtype, seed: int = 0, size: float = 1.0) -> Tensor:
    """Return [2, 3, tokens, head_dim] whose channels and tokens differ in size and offset, like real keys."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, tokens, head_dim, generator=generator)
    x = x * torch.rand(head_dim, generator=generator).mul(4).exp() + 5 * torch.randn(head_dim, generator=generator)
    return (x * size).to(dtype)


# Groups


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize(("bits", "zero_point"), FORMATS)
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_keys_share_a_scale_per_channel_and_values_one_per_token(
    head_dim: int, group_size: int, bits: int, zero_point: str, values: bool
) -> None:
    """Over g tokens, or a group of channels."""
    x = pairs(2 * group_size, head_dim, torch.float32)
    along, size = (CHANNELS, channels_of(head_dim, group_size)) if values else (TOKENS, group_size)
    codes, params = quantize(x, along, size, bits, zero_point, x.dtype)
    assert codes.shape == x.shape
    assert params.shape == ((2, 3, 2 * group_size, 2, head_dim // size) if values else (2, 3, 2, 2, head_dim))
    assert params.dtype == x.dtype
    groups, dim = x.double().unflatten(along, (-1, size)), along + 1
    scale, zero = formula(groups.amin(dim), groups.amax(dim), bits, zero_point)
    torch.testing.assert_close(params.double(), torch.stack([scale, zero], 3), rtol=1e-5, atol=1e-5)
    levels = ((groups - zero.unsqueeze(dim)) / scale.unsqueeze(dim)).round().clamp(0, 2**bits - 1)
    rebuilt = (levels * scale.unsqueeze(dim) + zero.unsqueeze(dim)).view_as(x)
    assert_same_levels(dequantize(codes, params, along), rebuilt, scale.repeat_interleave(size, along))


def assert_same_levels(actual: Tensor, expected: Tensor, step: Tensor) -> None:
    """Require equality up to float32; an element half way between two levels may take either."""
    difference = (actual.double() - expected).abs()
    slop = 1e-5 * expected.abs().amax()
    other_level = difference > slop
    assert (difference <= step + slop).all()
    assert other_level.double().mean() < 1e-3


# Accuracy


@PROPERTY
@given(
    elements=st.lists(st.floats(-65504.0, 65504.0, width=16), min_size=2, max_size=64),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(FORMATS),
)
def test_an_element_is_off_by_half_a_step_and_the_rounding_of_what_is_stored(
    elements: list[float], dtype: torch.dtype, form: tuple[int, str]
) -> None:
    bits, zero_point = form
    group = torch.tensor(elements).to(dtype)
    codes, scale, zero = encode(group, 0, bits, zero_point, dtype)
    assert scale.dtype == zero.dtype == dtype
    assert int(codes.max()) < 2**bits
    rebuilt = codes.double() * scale.double() + zero.double()
    assert ((rebuilt - group.double()).abs() <= bound(group.amin(), group.amax(), bits, zero_point, dtype)).all()


# Edges


@pytest.mark.parametrize(("bits", "zero_point"), FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("constant", [0.0, -0.1, 3.3, 1e-7, -6e4])
def test_a_constant_group_gives_back_its_constant(
    constant: float, dtype: torch.dtype, bits: int, zero_point: str
) -> None:
    x = torch.full((1, 2, 32, 80), constant, dtype=dtype)
    assert torch.equal(round_trip(x, TOKENS, bits, zero_point), x.float())
    assert torch.equal(round_trip(x, CHANNELS, bits, zero_point), x.float())


@pytest.mark.parametrize(("bits", "zero_point"), FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinity_takes_an_end_of_its_group_and_spoils_nothing_else(
    dtype: torch.dtype, bits: int, zero_point: str
) -> None:
    clean = pairs(32, 64, dtype)
    broken = clean.clone()
    broken[0, 0, 3, 5], broken[0, 1, 4, 6], broken[1, 2, 5, 7] = math.inf, -math.inf, math.nan
    broken[1, 0] = math.nan  # nothing finite
    broken[1, 0, :, ::2] = math.inf
    finite = broken.isfinite()
    for along, dim, groups in ((TOKENS, 2, broken), (CHANNELS, 4, broken.unflatten(3, (-1, 32)))):
        low = groups.float().masked_fill(~groups.isfinite(), math.inf).amin(dim, True)
        high = groups.float().masked_fill(~groups.isfinite(), -math.inf).amax(dim, True)
        rebuilt = round_trip(broken, along, bits, zero_point)
        assert rebuilt.isfinite().all()
        limit = bound(low, high, bits, zero_point, dtype).expand_as(groups).reshape_as(broken)
        assert ((rebuilt.double() - broken.double()).abs() <= limit)[finite].all()
        grouped = rebuilt.view_as(groups)
        for place, end in (((0, 0, 3, 5), grouped.amax), ((0, 1, 4, 6), grouped.amin), ((1, 2, 5, 7), grouped.amin)):
            assert rebuilt[place] == end(dim, True).expand_as(groups).reshape_as(broken)[place]


@pytest.mark.parametrize(("bits", "zero_point"), FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("low", [-1.0, 0.0, 0.5])
def test_numbers_as_large_as_the_dtype_has_stay_finite(
    low: float, dtype: torch.dtype, bits: int, zero_point: str
) -> None:
    largest = torch.finfo(dtype).max
    x = torch.empty(1, 1, 32, 32, dtype=dtype).fill_(largest)
    x[:, :, ::2, ::2] = low * largest
    x[:, :, ::3, ::3] = 0.0
    for along in (TOKENS, CHANNELS):
        rebuilt = round_trip(x, along, bits, zero_point)
        assert rebuilt.isfinite().all()
        assert (rebuilt.abs().double() <= largest * (1 + 2**bits * torch.finfo(dtype).eps)).all()


@pytest.mark.parametrize("bits", [1, 8])
def test_float64_is_quantised_within_the_range_of_float32(bits: int) -> None:
    keys = torch.randn(1, 2, 64, 16, dtype=torch.float64)
    codes, params = quantize(keys, TOKENS, 32, bits, "midpoint", keys.dtype)
    assert params.dtype == torch.float64
    single = quantize(keys.float(), TOKENS, 32, bits, "midpoint", torch.float32)
    assert torch.equal(codes, single[0])
    assert torch.equal(params.float(), single[1])
