"""Attention to rows that are keys and values at once, of a few query rows, in tiles of bfloat16: beside float64."""

from __future__ import annotations

from ctypes import CDLL

import pytest
import torch
from torch import Tensor

from specache_compile.kernels.attention.flash import FEW_ROWS, attend_latents, latents_kernel, parts_of
from specache_compile.kernels.cpp.library import latents_library

# Weights are rounded to bfloat16 before they meet the values.
CLOSE = 8e-3


@pytest.fixture
def library() -> CDLL:
    found = latents_library()
    if found is None:
        pytest.skip("this processor has no tiles")
    return found


def given(
    batch: int, rows: int, count: int, width: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, float]:
    """A query [batch, 1, rows, width], tokens [batch, 1, count, width] of a longer tensor, and a scale."""
    generator = torch.Generator().manual_seed(rows + count)
    q = torch.randn(batch, 1, rows, width, generator=generator)
    tokens = torch.randn(batch, 1, count + 3, width, generator=generator)
    return q.to(dtype), tokens.to(dtype)[:, :, 3:], 3 * width**-0.5


def exact(q: Tensor, tokens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    logits = q.double() @ tokens.double().mT * scale
    return logits.softmax(-1) @ tokens.double(), logits.logsumexp(-1)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("batch", "rows", "count", "width"),
    [(1, 16, 1, 64), (1, 16, 127, 576), (2, 40, 300, 288), (3, 1, 129, 96), (1, 17, 1000, 64), (2, 64, 260, 32)],
)
def test_cpp_tiles_give_the_output_and_the_sums_logarithm(
    library: CDLL, batch: int, rows: int, count: int, width: int, threads: int
) -> None:
    """Blocks are of 128 tokens."""
    q, tokens, scale = given(batch, rows, count, width)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out, total = attend_latents(library, q, tokens, scale)
    finally:
        torch.set_num_threads(before)
    told_out, told_total = exact(q, tokens, scale)
    torch.testing.assert_close(out.double(), told_out, atol=CLOSE, rtol=CLOSE)
    torch.testing.assert_close(total.double(), told_total, atol=1e-4, rtol=1e-5)


def test_cpp_tiles_scale_down_what_was_mixed_before_a_larger_logit(library: CDLL) -> None:
    """To nothing where it is far larger."""
    q, tokens, scale = given(1, 16, 700, 64)
    tokens = tokens * torch.linspace(0.1, 20, 700).bfloat16()[None, None, :, None]
    out, total = attend_latents(library, q, tokens, scale)
    told_out, told_total = exact(q, tokens, scale)
    largest = tokens.abs().max().item()
    torch.testing.assert_close(out.double(), told_out, atol=CLOSE * largest, rtol=CLOSE)
    torch.testing.assert_close(total.double(), told_total, atol=1e-3, rtol=1e-4)


def test_cpp_tiles_are_for_few_rows_of_one_memory(library: CDLL) -> None:
    q, tokens, scale = given(1, 16, 200, 64)
    assert latents_kernel(q, tokens, tokens) is library
    assert latents_kernel(q, tokens, tokens.clone()) is None
    assert latents_kernel(q, tokens, tokens[..., :32]) is None
    assert latents_kernel(q, tokens[..., ::2], tokens[..., ::2]) is None
    assert latents_kernel(q.repeat(1, 1, FEW_ROWS, 1), tokens, tokens) is None
    assert latents_kernel(q.float(), tokens.float(), tokens.float()) is None
    odd = tokens[..., :48].contiguous()
    assert latents_kernel(q[..., :48], odd, odd) is None
    assert latents_kernel(q[..., :32], tokens, tokens) is None
    ((out, _),) = parts_of(q, tokens, tokens, None, scale)
    assert torch.equal(out, attend_latents(library, q, tokens, scale)[0])


def test_cpp_or_flash_a_mask_is_followed() -> None:
    q, tokens, scale = given(1, 16, 200, 64, torch.float32)
    seen = torch.rand(1, 1, 1, 200, generator=torch.Generator().manual_seed(0)) < 0.5
    ((out, _),) = parts_of(q, tokens, tokens, seen, scale)
    told, _ = exact(q, tokens[:, :, seen[0, 0, 0]], scale)
    torch.testing.assert_close(out.double(), told, atol=2e-5, rtol=2e-5)
