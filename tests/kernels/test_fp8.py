"""The codes of the FP8 cache against their numbers (OCP 8-bit floating point, E4M3), and Triton's kernels for it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from decode_step import Case, make_mask
from implementations import GPU, Ops

from held_tiers import adjacent, cursor_over, in_pages
from specache_compile.kernels.attention.extend import extend_attention
from specache_compile.kernels.state.stored_pairs import FP8, decoded

CODES = range(127)  # those of no sign; 127 is NaN, and there is no infinity


def value_of(code: int) -> float:
    """Decode four bits of exponent, biased by 7, and three of mantissa."""
    exponent, mantissa = divmod(code, 8)
    return mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def nearest(x: float) -> float:
    """Return the nearest code, with even mantissa in a tie; the largest code for larger numbers. NaN stays."""
    if math.isnan(x):
        return x
    size = min(abs(x), value_of(CODES[-1]))
    code = min(CODES, key=lambda code: (abs(value_of(code) - size), code % 2))
    return math.copysign(value_of(code), x)


@pytest.mark.parametrize("kind", ["definition", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_pair_is_stored_as_its_nearest_codes_after_earlier_pairs(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    k, v = (torch.randn(2, 5, 3, 20) * 10 ** torch.linspace(-4, 3, 20) for _ in range(2))  # strided: [B, T, H, d]
    ties = [(value_of(code) + value_of(code + 1)) / 2 for code in (0, 1, 7, 8, 99, 125)]
    k[0, 0, 0, :10] = torch.tensor([*ties, 448.0, 464.1, -1e30, -0.0])
    v[1, 4, 2, 0], k[1, 0, 0, 0] = math.inf, math.nan
    k, v = (x.to(dtype).transpose(1, 2) for x in (k, v))
    ops, cache = Ops(kind), torch.full((2, 3, 256, 2, 20), 85, dtype=torch.uint8)
    cache = cache.to(ops.device)
    ops.keep_fp8(k.to(ops.device), v.to(ops.device), None, cursor_over(adjacent(2, 256), 4).to(ops.device), cache)
    found = decoded(cache.cpu(), torch.float32, 20)
    for part, given in enumerate((k, v)):
        expected = torch.tensor([nearest(x) for x in given.flatten().tolist()]).view(given.shape)
        torch.testing.assert_close(found[:, :, 4:9, part], expected, atol=0.0, rtol=0.0, equal_nan=True)
    assert (cache[:, :, :4] == 85).all()
    assert (cache[:, :, 9:] == 85).all()


STEP = Case(length=300, head_dim=64, dtype=torch.float16)
CASES = [
    STEP,
    replace(STEP, head_dim=8, ratio=1, length=0),
    replace(STEP, head_dim=80, ratio=5, mask="padding", softcap=5.0),
    replace(STEP, mask="random", length=129, sinks=True),
    replace(STEP, head_dim=16, mask="position bias", length=130, dtype=torch.float32, ratio=9, softcap=5.0),
    *([replace(STEP, head_dim=128, ratio=4, dtype=torch.bfloat16)] if GPU.type == "cuda" else []),
]
ACCURACY = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_attends_over_codes_as_the_definition_does(case: Case) -> None:
    torch.manual_seed(0)
    d, heads = case.head_dim, 2 * case.ratio
    k, v = torch.randn(2, 2, 1, 2, d).to(GPU, case.dtype).transpose(2, 3)
    q = torch.randn(2, 1, heads, d).to(GPU, case.dtype).transpose(1, 2)
    codes = torch.randn(2, 2, 512, 2, d).to(FP8).view(torch.uint8).to(GPU)
    codes[:, :, case.length :] = 0x7F  # NaN, as unwritten memory may be
    pages = in_pages(codes)
    cursor = cursor_over(pages.table, case.length).to(GPU)
    sinks = torch.randn(heads).to(GPU, case.dtype) if case.sinks else None
    mask = make_mask(case.mask, 2, heads, 1, case.length, 1, torch.Generator().manual_seed(0))
    read = (None if mask is None else mask.to(GPU), sinks, cursor, pages.pages, d**-0.5, case.softcap)
    out = Ops("triton").fp8_attention(q, k, v, *read)
    expected = extend_attention(q.float(), k.float(), v.float(), *read)
    torch.testing.assert_close(out.float(), expected, atol=ACCURACY[case.dtype], rtol=ACCURACY[case.dtype])
    assert out.is_contiguous()
