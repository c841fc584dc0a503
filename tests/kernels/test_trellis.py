"""The trellis code against its formula bit by bit, against an exhaustive search, and against theory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specache_compile.kernels.codes import trellis
from specache_compile.kernels.codes.records import order_of, stored_dim, unpacked

HEAD_DIMS = (8, 16, 40, 64, 80, 96, 128, 256)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def level(b: list[int], t: int) -> int:
    """Return q_t of the documented formula; negative indices count from the end."""
    return 2 * (b[t] ^ b[t - 1] ^ b[t - 3]) + b[t - 2]


def round_trip(x: Tensor, values: bool, start: int = 0) -> Tensor:
    """Return keys or values [B, H, T, d] of tokens from `start` on, encoded and decoded."""
    dim, first = stored_dim(x.shape[3]), start % 64
    codes, scale = trellis.quantize(x, start, dim, values)
    levels = trellis.levels_of_bits(unpacked(codes, 1), dim, values)[:, :, first : first + x.shape[2], : x.shape[3]]
    return trellis.dequantize(levels, scale)


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_four_circular_bits_select_a_level(dim: int, values: bool) -> None:
    """A word is a circle: bit 0 follows bit 31."""
    words = torch.randint(0, 2, (2, 1, 2, 64 * dim), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    levels = trellis.levels_of_bits(words, dim, values).flatten(2)
    order = order_of(dim, 1, values)
    for head, found in zip(words[:, 0].tolist(), levels[:, 0].tolist(), strict=True):
        for record, row in enumerate(head):
            for first in range(0, len(row), 32):
                b = row[first : first + 32]
                for t in range(32):
                    assert found[record * 64 * dim + int(order[first + t])] == level(b, t)


def test_a_walk_finds_the_nearest_of_all_paths_between_two_states() -> None:
    x = normal(1, 7)
    for begin in range(trellis.STATES):
        costs = torch.full((1, trellis.STATES), math.inf)
        costs[0, begin] = 0.0
        found, choices = trellis.walked(x, costs)
        found_path, start = trellis.followed(choices, torch.zeros(1, 1, dtype=torch.int64))
        assert start == begin
        before = [begin >> 2 & 1, begin >> 1 & 1, begin & 1]
        best = dict.fromkeys(range(trellis.STATES), (math.inf, ()))
        for path in itertools.product((0, 1), repeat=7):
            b = [*before, *path]
            away = sum((x[0, t].item() - (level(b, t + 3) - 1.5)) ** 2 for t in range(7))
            end = b[-1] + 2 * b[-2] + 4 * b[-3]
            best[end] = min(best[end], (away, path))
        expected = torch.tensor([best[end][0] for end in range(trellis.STATES)])
        torch.testing.assert_close(2 * found[0] + (x * x).sum(), expected, atol=1e-5, rtol=1e-5)
        assert found_path[0].tolist() == list(best[0][1])


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_for_gaussian_numbers_its_error_is_below_that_of_two_levels(head_dim: int) -> None:
    """Two levels (Lloyd and Max) leave .36 of the variance, the best possible one-bit code .25."""
    x = normal(1, 1, 3008, head_dim)
    for values in (False, True):
        decoded = round_trip(x, values)
        # The scale is unbiased: its square is 1 / (1 - error) of the nearest levels' mean square.
        error = 1 - (x * x).sum() / (decoded * decoded).sum()
        assert 0.25 < error < 0.315


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_scale_is_unbiased_along_the_vector(head_dim: int) -> None:
    x = normal(2, 3, 50, head_dim) * normal(2, 3, 50, 1, seed=1).exp()
    for values, start in ((False, 0), (True, 32)):
        decoded = round_trip(x, values, start)
        torch.testing.assert_close((decoded * x).sum(-1), (x * x).sum(-1), rtol=1e-4, atol=1e-6)


def test_large_small_zero_and_non_finite_numbers() -> None:
    x = normal(1, 1, 5, 64)
    x[0, 0, 0] *= 1e37
    x[0, 0, 1] *= 1e-30
    x[0, 0, 2] = 0.0
    x[0, 0, 3, 7], x[0, 0, 3, 9] = math.inf, math.nan
    decoded = round_trip(x, values=True)
    assert decoded.isfinite().all()
    assert (decoded[0, 0, 2] == 0).all()
    x[0, 0, 3, 7], x[0, 0, 3, 9] = 0.0, 0.0
    torch.testing.assert_close(decoded, round_trip(x, values=True))
    for row in (0, 1, 3, 4):
        exact = x[0, 0, row].double()
        assert ((decoded[0, 0, row] - exact) ** 2).sum() < 0.7 * (exact * exact).sum()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_quantiser_in_cpp_gives_the_same_codes_and_scales(head_dim: int) -> None:
    x = torch.nn.functional.pad(normal(2, 3, 192, head_dim), (0, stored_dim(head_dim) - head_dim))
    x *= torch.tensor([1.0, 1e37, 1e-30, 0.0]).repeat(48)[:, None]
    for values in (False, True):
        (codes, scale), (found, found_scale) = (
            run(x, head_dim, values) for run in (trellis.quantize_records, trellis.quantize_fused)
        )
        assert (codes != found).float().mean() < 5e-3  # either of two equally near paths
        same = (codes == found).all(-1).repeat_interleave(64, -1)
        assert same.float().mean() > 0.5
        torch.testing.assert_close(found_scale[same], scale[same], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("run", [trellis.quantize_records, trellis.quantize_fused])
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_threads_and_the_default_dtype_change_nothing(run: Callable[..., Any], default: torch.dtype) -> None:
    x, threads, before = normal(2, 3, 640, 64), torch.get_num_threads(), torch.get_default_dtype()
    expected = run(x, 64, True)
    torch.set_num_threads(2)
    torch.set_default_dtype(default)
    try:
        found = run(x, 64, True)
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(before)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(expected, found, strict=True))
