"""8-bit scales and zero points against the docstring's format, in Python numbers."""

from __future__ import annotations

import math

import pytest
import torch

from specache_compile.kernels.codes.params import LARGEST_SCALE, read_params, read_scale, stored_params, stored_scale
from specache_compile.kernels.codes.quantize import TOKENS, dequantize, quantize


def number(byte: int) -> float:
    """Decode five bits of exponent and three of mantissa, without sign, as in IEEE's half precision."""
    exponent, mantissa = byte >> 3, byte & 7
    return mantissa / 8 * 2.0**-14 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 15)


EVERY = torch.arange(247, dtype=torch.uint8)


def test_every_byte_decodes_to_the_number_of_its_bits_and_encodes_to_itself() -> None:
    numbers = read_scale(EVERY)
    assert numbers.tolist() == [number(byte) for byte in range(247)]
    assert numbers[-1] == LARGEST_SCALE
    assert torch.equal(stored_scale(numbers, torch.uint8), EVERY)


def test_a_scale_is_the_nearest_of_those() -> None:
    scale = torch.rand(2000, generator=torch.Generator().manual_seed(0)).mul(24).sub(14).exp2()
    found = read_scale(stored_scale(scale, torch.uint8))
    every = read_scale(EVERY)
    nearest = (scale[:, None] - every).abs().amin(1)
    assert ((found - scale).abs() <= nearest + scale * 2**-10).all()  # it is a float16 first
    assert read_scale(stored_scale(torch.tensor([1e9]), torch.uint8)) == LARGEST_SCALE


@pytest.mark.parametrize("away", [0.0, 0.3, 1.5, 13.0, -13.0])
def test_a_zero_point_is_a_sixteenth_of_a_scale_off_at_most(away: float) -> None:
    scale = torch.rand(500, generator=torch.Generator().manual_seed(1)) + 0.5
    step, zero = read_params(*stored_params(scale, away * scale, torch.uint8))
    assert ((zero - away * scale).abs() <= step / 16 + 1e-6).all()
    assert ((step / scale - 1).abs() <= 1 / 16).all()


@pytest.mark.parametrize("away", [20.0, -500.0, math.inf])
def test_a_scale_grows_with_a_zero_point_above_its_eighths(away: float) -> None:
    zero = torch.tensor([7.0 if math.isinf(away) else away])
    scale = torch.tensor([0.0 if math.isinf(away) else 1.0])  # inf: a group of one number
    step, found = read_params(*stored_params(scale, zero, torch.uint8))
    assert (found - zero).abs() <= step / 16 + 1e-6
    assert step <= zero.abs() / 13


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_keys_come_back_as_near_as_their_step_and_its_rounding_let_them(bits: int) -> None:
    keys = torch.randn(2, 3, 128, 64, generator=torch.Generator().manual_seed(2)) + 3 * torch.randn(64)
    codes, params = quantize(keys, TOKENS, 64, bits, "middles", torch.uint8)
    assert params.dtype == torch.uint8
    off = (dequantize(codes, params, TOKENS) - keys).abs().unflatten(2, (2, 64))
    step = read_scale(params[:, :, :, 0])[:, :, :, None]
    # The zero point and each step are off by a sixteenth; at the end of the range these errors add up.
    assert (off <= step * (0.5 + 1 / 16 + ((1 << bits) - 0.5) / 16) + 1e-5).all()
