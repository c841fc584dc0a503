"""The codes of the FP8 cache against their numbers (OCP 8-bit floating point, E4M3)."""

from __future__ import annotations

import math

import torch

from held_tiers import adjacent, cursor_over
from specache_compile.evaluation.baselines import fp8  # noqa: F401 - declares its op
from specache_compile.kernels.state.stored_pairs import decoded

CODES = range(127)  # those of no sign; 127 is NaN, and there is no infinity


def value_of(code: int) -> float:
    """Decode four bits of exponent, biased by 7, and three of mantissa."""
    exponent, mantissa = divmod(code, 8)
    return mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def nearest(x: float) -> float:
    """Return the nearest code, with even mantissa in a tie; the largest code for larger numbers."""
    size = min(abs(x), value_of(CODES[-1]))
    code = min(CODES, key=lambda code: (abs(value_of(code) - size), code % 2))
    return math.copysign(value_of(code), x)


def test_a_pair_is_stored_as_its_nearest_codes_after_earlier_pairs() -> None:
    torch.manual_seed(0)
    k, v = (torch.randn(2, 3, 5, 16) * 10 ** torch.linspace(-4, 3, 16) for _ in range(2))
    ties = [(value_of(code) + value_of(code + 1)) / 2 for code in (0, 1, 7, 8, 99, 125)]
    k[0, 0, 0, :9] = torch.tensor([*ties, 448.0, 464.1, -1e30])
    v[1, 2, 4, 0] = math.inf
    cache = torch.zeros(2, 3, 256, 2, 16, dtype=torch.uint8)
    torch.ops.specache.keep_fp8(k, v, None, cursor_over(adjacent(2, 256), 4), cache)
    found = decoded(cache, torch.float32, cache.shape[-1])
    for part, given in enumerate((k, v)):
        expected = torch.tensor([nearest(x) for x in given.flatten().tolist()]).view(given.shape)
        assert torch.equal(found[:, :, 4:9, part], expected)
    assert not found[:, :, :4].any()
    assert not found[:, :, 9:].any()


def test_nan_stays_nan() -> None:
    k = torch.full((1, 1, 1, 8), math.nan)
    cache = torch.zeros(1, 1, 256, 2, 8, dtype=torch.uint8)
    torch.ops.specache.keep_fp8(k, k, None, cursor_over(adjacent(1, 256)), cache)
    assert decoded(cache[:, :, :1], torch.bfloat16, cache.shape[-1]).isnan().all()
