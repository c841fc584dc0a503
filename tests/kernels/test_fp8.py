"""The codes of the FP8 cache against their numbers (OCP 8-bit floating point, E4M3), and Triton's kernels for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from held_tiers import adjacent, cursor_over, in_pages
from specache_compile.evaluation.baselines import fp8
from specache_compile.kernels.attention.extend import extend_attention
from specache_compile.kernels.state.stored_pairs import FP8, decoded

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

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


@pytest.fixture
def kernels() -> Any:
    pytest.importorskip("triton")
    from specache_compile.evaluation.baselines import triton_fp8

    return triton_fp8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_triton_stores_the_same_codes(kernels: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    k, v = (torch.randn(2, 24, 3, 20) * 10 ** torch.linspace(-4, 3, 20) for _ in range(2))  # strided: [B, T, H, d]
    known = torch.arange(256, dtype=torch.uint8).view(FP8).float().nan_to_num(0.0).unique()
    k[0, :8] = torch.cat([known, (known[1:] + known[:-1]) / 2])[:480].view(8, 3, 20)
    k[1, 0, 0, :3], v[1, 2, 2, :2] = torch.tensor([math.nan, 464.1, -0.0]), torch.tensor([math.inf, -1e30])
    k, v = (x.to(DEVICE, dtype).transpose(1, 2) for x in (k, v))
    cursor = cursor_over(adjacent(2, 256), 4).to(DEVICE)
    found, expected = torch.full((2, 2, 3, 256, 2, 20), 85, dtype=torch.uint8, device=DEVICE).unbind()
    kernels.keep_fp8(k, v, None, cursor, found)
    fp8.keep_fp8(k, v, None, cursor, expected)
    a, b = (decoded(x, torch.float32, 20) for x in (found, expected))
    torch.testing.assert_close(a, b, atol=0.0, rtol=0.0, equal_nan=True)


@dataclass(frozen=True)
class Case:
    """One step over the FP8 cache."""

    d: int = 64
    queries: int = 2
    tokens: int = 300
    mask: str = ""
    dtype: torch.dtype = torch.float16
    softcap: float | None = None
    sinks: bool = False


CASES = [
    Case(),
    Case(d=8, queries=1, tokens=0),
    Case(d=80, queries=5, mask="padding", softcap=5.0),
    Case(mask="bool", tokens=129, sinks=True),
    Case(d=16, mask="additive", tokens=130, dtype=torch.float32, queries=9, softcap=5.0),
    *([Case(d=128, queries=4, dtype=torch.bfloat16)] if DEVICE.type == "cuda" else []),
]
ACCURACY = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def mask_of(case: Case) -> Tensor | None:
    tokens = case.tokens + 1
    if case.mask == "padding":
        return (torch.arange(tokens) >= torch.tensor([0, 70]).view(-1, 1, 1, 1)).to(DEVICE)
    if case.mask == "bool":
        return (torch.rand(2, 2 * case.queries, 1, tokens) > 0.3).to(DEVICE)
    return torch.randn(2, 1, 1, tokens).to(DEVICE, case.dtype) if case.mask else None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_attends_over_codes_as_the_definition_does(kernels: Any, case: Case) -> None:
    torch.manual_seed(0)
    new = torch.randn(4, 2, 1, 2, case.d).to(DEVICE, case.dtype).transpose(2, 3)
    q, (k, v) = torch.randn(2, 1, 2 * case.queries, case.d).to(DEVICE, case.dtype).transpose(1, 2), new[:2].unbind()
    codes = torch.randn(2, 2, 512, 2, case.d).to(FP8).view(torch.uint8).to(DEVICE)
    codes[:, :, case.tokens :] = 0x7F  # NaN, as unwritten memory may be
    pages = in_pages(codes)
    cursor = cursor_over(pages.table, case.tokens).to(DEVICE)
    sinks = torch.randn(2 * case.queries).to(DEVICE, case.dtype) if case.sinks else None
    read = (mask_of(case), sinks, cursor, pages.pages, case.d**-0.5, case.softcap)
    out = kernels.fp8_attention(q, k, v, *read)
    expected = extend_attention(q.float(), k.float(), v.float(), *read)
    torch.testing.assert_close(out.float(), expected, atol=ACCURACY[case.dtype], rtol=ACCURACY[case.dtype])
    assert out.is_contiguous()
