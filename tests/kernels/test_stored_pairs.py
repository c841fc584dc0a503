"""An 8-bit host tier: stored pairs against float64, and equality of the definition, C++ and Triton."""

from __future__ import annotations

import pytest
import torch
from implementations import GPU, KINDS, Ops
from torch import Tensor

from held_tiers import adjacent, cursor_over, in_pages
from specache_compile.kernels.movement import tier_ops as tiers
from specache_compile.kernels.state.page_table import PAGE, Pages, tokens_of
from specache_compile.kernels.state.stored_pairs import ROUNDED, decoded, parts_of, rounded_width, stored

B, H, C = 2, 3, 2 * PAGE
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
WIDTHS = pytest.mark.parametrize("d", [64, 80, 30])
TABLE = adjacent(B, C)


def empty_host(d: int) -> Tensor:
    return in_pages(torch.zeros(B, H, C, 2, rounded_width(d), dtype=ROUNDED)).pages


def some_pairs(tokens: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return k, v [B, H, T, d] with sizes from 0.001 to 1,000, and a zero, a subnormal, an inf and a NaN vector."""
    generator = torch.Generator().manual_seed(d)
    k, v = torch.randn(2, B, H, tokens, d, generator=generator) * 10.0 ** torch.linspace(-3, 3, tokens)[:, None]
    k[0, 0, 0] = 0.0
    k[0, 0, 1] = 1e-7
    v[0, 1, 2, 3] = float("inf")
    v[1, 0, 1, 0] = float("nan")
    return k.to(dtype), v.to(dtype)


@DTYPES
@WIDTHS
def test_a_number_is_half_a_127th_of_its_vectors_largest_away_at_most(dtype: torch.dtype, d: int) -> None:
    pairs = torch.stack(some_pairs(7, d, dtype), 3)
    found = decoded(stored(pairs, ROUNDED, rounded_width(d)), torch.float32, d).double()
    exact, finite = pairs.double(), pairs.isfinite().all(-1)
    step = exact.abs().amax(-1, keepdim=True) / 127
    assert ((found - exact).abs() <= step / 2 * 1.0001)[finite].all()
    assert found[~finite].isnan().all(), "an element that is not finite makes its whole vector not finite"
    assert finite.sum() == finite.numel() - 2


def test_pairs_of_other_dtypes_are_stored_unchanged() -> None:
    pairs = torch.randn(1, 1, 3, 2, 8)
    assert stored(pairs, pairs.dtype, 8) is pairs
    assert decoded(pairs, torch.float32, 8) is pairs


@WIDTHS
def test_the_codes_of_a_pair_are_contiguous_and_aligned(d: int) -> None:
    """So a fetch reads whole lines. The scales of a head's page are behind all codes, in float32."""
    host, pairs = empty_host(d), torch.stack(some_pairs(C, d, torch.float32), 3)
    tiers.offload(*pairs.unbind(3), None, cursor_over(TABLE), host)
    page = host[1, 2].flatten().contiguous()
    padded = rounded_width(d) - 4
    codes, scales = page[: PAGE * 2 * padded].view(PAGE, 2, padded), page[PAGE * 2 * padded :].view(torch.float32)
    expected = pairs[0, 2, PAGE:]
    torch.testing.assert_close(scales.view(PAGE, 2), expected.abs().amax(-1) / 127)
    assert ((codes[..., :d] * scales.view(PAGE, 2, 1) - expected).abs() <= 0.51 * scales.view(PAGE, 2, 1)).all()
    assert not codes[..., d:].any()
    assert [part.data_ptr() - host.data_ptr() for part in parts_of(host)] == [0, PAGE * 2 * padded]


@pytest.mark.pairwise
@DTYPES
@WIDTHS
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("count", [1, 7, 200])
def test_what_is_stored_is_the_definitions(dtype: torch.dtype, d: int, kind: str, count: int) -> None:
    k, v = (x[:, :, :count] for x in some_pairs(max(count, 7), d, dtype))
    cursor, ops, hosts = cursor_over(TABLE, PAGE - 3), Ops(kind), (empty_host(d), empty_host(d))
    tiers.offload(k, v, None, cursor, hosts[0])
    there = hosts[1].to(ops.device)
    ops.offload(k.to(ops.device), v.to(ops.device), None, cursor.to(ops.device), there)
    assert equal(hosts[0], there.cpu(), d)
    assert count == 1 or hosts[0].any()


def equal(host: Tensor, other: Tensor, d: int) -> bool:
    """Return whether hosts are equal bit for bit, except for NaN."""
    rows = [tokens_of(Pages(x, TABLE), 0, C) for x in (host, other)]
    numbers = (decoded(x, torch.float32, d).nan_to_num(nan=1e30) for x in rows)
    return torch.equal(*numbers) and torch.equal(*(x[..., :d] for x in rows))


@pytest.mark.pairwise
@DTYPES
@WIDTHS
@pytest.mark.parametrize("kind", KINDS)
def test_fetched_pairs_equal_the_hosts(dtype: torch.dtype, d: int, kind: str) -> None:
    """Also if some pairs stay; the counted bytes are the host's."""
    k, v = torch.randn(2, B, H, C, d, generator=torch.Generator().manual_seed(0)).to(dtype)
    ops, host = Ops(kind), empty_host(d)
    tiers.offload(k, v, None, cursor_over(TABLE), host)
    slots, index = torch.zeros(B, H, 8, 2, d, dtype=dtype), torch.full((B, H, 8), -1, dtype=torch.int32)
    moved, cursor = torch.zeros(1, dtype=torch.int64), cursor_over(TABLE, C, C, C)
    cursor, there, slots, index, moved = (x.to(ops.device) for x in (cursor, host, slots, index, moved))
    for first, travelled in ((0, 8), (5, 5)):
        selected = (first + torch.arange(8)).int().expand(B, H, 8).contiguous() * 40
        moved.zero_()
        ops.prefetch(selected.to(ops.device), cursor, there, slots, index, moved)
        assert int(moved) == B * H * travelled * 2 * rounded_width(d)
        assert torch.equal(index.sort(-1).values.cpu(), selected)
    expected = decoded(stored(torch.stack([k, v], 3), ROUNDED, rounded_width(d)), dtype, d)
    at = index.cpu().long()[..., None, None].expand(-1, -1, -1, 2, d)
    # The interpreter does not round to bfloat16.
    cut_off = 2.0**-7 if dtype == torch.bfloat16 and kind == "triton" and GPU.type == "cpu" else 0.0
    torch.testing.assert_close(slots.cpu(), expected.gather(2, at), rtol=cut_off, atol=0.0)
