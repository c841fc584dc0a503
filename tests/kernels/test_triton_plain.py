"""Triton's attention over rows of tokens against float64: codes of 8 bits, pairs in 16 bits or float32, e4m3 codes.

bfloat16 runs only on a GPU: the interpreter multiplies it as integers.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kept_fixture import random_mask, whole_rows, write_kept
from record_fixture import in_pages

from held_tiers import cursor_over
from specache_compile.kernels.attention.attention_ops import capped, low_bit_keys, low_bit_values
from specache_compile.kernels.attention.kept_logits import based_logits
from specache_compile.kernels.codes.records import RECORD
from specache_compile.kernels.decode import triton_plain
from specache_compile.kernels.decode.triton_decode import DecodeInputs, Sums, mask_form
from specache_compile.kernels.movement.tier_ops import store_low_bit
from specache_compile.kernels.state.center import set_center, share_of_center
from specache_compile.kernels.state.layout import Layout, rotated
from specache_compile.kernels.state.page_table import PAGE
from specache_compile.kernels.state.stored_tiers import StoredTiers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH, HEADS, CAPACITY = 2, 2, 512
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """One tier's shape, and the step that reads it."""

    bits: int = 16
    d: int = 64
    group: int = 64
    rows: tuple[int, int] = (2, 1)  # query heads of a KV head, and lanes
    mask: str = ""
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    extra: str = ""  # rotated, centered, with sinks
    tokens: int = 192

    @property
    def layout(self) -> Layout:
        return Layout(self.bits, self.bits, int(self.extra == "rotated"))


def tiers_of(case: Case) -> tuple[StoredTiers, Tensor, Tensor]:
    """Return tiers with random pairs, and their keys and values [B, H, n, d] in float64."""
    layout, rows = case.layout, (BATCH, HEADS)
    pairs = torch.randn(*rows, case.tokens, 2, case.d).to(DEVICE, case.dtype)
    new = pairs.new_zeros
    # What no op has written may be NaN.
    codes, params = new((*rows, CAPACITY, layout.width(case.d))).fill_(math.nan), [new(0)] * 2
    if layout.is_quantised:
        dim = layout.width(case.d) * 4 // case.bits
        codes = torch.randint(0, 256, codes.shape, dtype=torch.uint8).to(DEVICE)
        shapes = (CAPACITY // case.group, 2, dim), (CAPACITY, 2, max(1, dim // case.group))
        params = [new((*rows, *shape)).fill_(math.nan) for shape in shapes]
    center = new((*rows, 4 if case.extra == "centered" else 0, case.d), dtype=torch.float32)
    sink_tokens = [0, 5, 70] if case.extra == "sinks" else []
    sink_index = torch.tensor(sink_tokens, dtype=torch.int32, device=DEVICE).expand(BATCH, 1, -1).contiguous()
    sink_pairs = new((*rows, len(sink_tokens), 2, case.d))
    tiers = StoredTiers(codes, *params, center, sink_pairs, sink_index, new((*rows, 0, 2, case.d)))
    if center.shape[2]:
        pairs[..., 0, :] += 5 * torch.randn(case.d).to(pairs)
        set_center(pairs[..., 0, :].float(), None, 0.8 ** torch.arange(case.d // 2.0).to(DEVICE), center, case.group)
    store_low_bit(pairs, None, 0, tiers, layout, "minimum")
    keys, values = (read(tiers, layout, case.d, 0, case.tokens).double() for read in (low_bit_keys, low_bit_values))
    return tiers, keys, values


def by_row(x: Tensor) -> Tensor:
    """Return [B, Hq, lanes, ...] as [B, H, R, ...]."""
    return x.unflatten(1, (HEADS, -1)).flatten(2, 3)


def expected_logits(case: Case, q: Tensor, mask: Tensor | None, tiers: StoredTiers, keys: Tensor) -> Tensor:
    """Return the logits [B, H, R, n] in log2 units, in float64; -inf for hidden tokens and sinks."""
    query = rotated(q).double() if case.layout.is_rotated else q.double()
    logits = by_row(query * case.d**-0.5) @ keys.mT
    if tiers.center.shape[2]:
        grouped = q.float().unflatten(1, (HEADS, -1)) * case.d**-0.5
        logits += share_of_center(grouped, tiers.center, case.group, case.tokens).flatten(2, 3)
    logits = capped(logits, case.softcap)
    if mask is not None:
        shown = by_row(mask[..., : case.tokens].expand(*q.shape[:3], -1))
        logits = logits.masked_fill(~shown, -math.inf) if shown.dtype == torch.bool else logits + shown.double()
    logits[..., tiers.sink_index[0, 0].long()] = -math.inf
    return logits * math.log2(math.e)


def padded(x: Tensor) -> Tensor:
    """Return logits [B, H, R, n] with NaN after the last token, [B, H, R, C]."""
    return torch.nn.functional.pad(x, (0, CAPACITY - x.shape[3]), value=math.nan)


def log_sum(sums: Sums, rows: int) -> Tensor:
    """Return log2 of the whole sum of weights, [B, H, R]."""
    parts = sums.peaks.double() + sums.totals.double().log2()
    return (torch.logsumexp(parts * math.log(2), 1) / math.log(2)).view(BATCH, HEADS, -1)[..., :rows]


def output(sums: Sums, rows: int) -> Tensor:
    """Return the merged output [B, H, R, D]."""
    peak = sums.peaks.amax(1, keepdim=True)
    shrink = (sums.peaks - peak).exp2().nan_to_num().double()
    total = (sums.totals * shrink).sum(1)
    out = (sums.partial * shrink.unsqueeze(-1)).sum(1) / total.unsqueeze(-1)
    return out.view(BATCH, HEADS, *out.shape[1:])[:, :, :rows]


GRID = [
    Case(bits, d, group, rows, mask, dtype, softcap, extra, tokens)
    for bits, d, (group, tokens), rows, mask, dtype, softcap, extra in itertools.product(
        (8, 16), (8, 64, 80), ((32, 96), (64, 128), (128, 256)), ((1, 1), (2, 1), (3, 2), (5, 2), (10, 3)),
        ("", "padding", "bool", "additive"), (torch.float32, torch.float16), (None, 5.0),
        ("", "rotated", "centered", "sinks"),
    )
    if bits == 8 or extra not in ("rotated", "centered")
]  # fmt: skip
GRID = [GRID[i] for i in sorted({n * 7919 % len(GRID) for n in range(150)})]
if DEVICE.type == "cuda":
    GRID += [Case(bits, dtype=torch.bfloat16) for bits in (8, 16)]


def shuffled(tiers: StoredTiers, tokens: int) -> tuple[StoredTiers, Tensor]:
    """Return the tiers in pages, in any order, and a cursor over them."""
    table = torch.randperm(BATCH * CAPACITY // PAGE).view(BATCH, -1)
    moved = [in_pages(tier.cpu(), table).to(DEVICE) if tier.numel() else tier for tier in tiers[:3]]
    return StoredTiers(*moved, *tiers[3:]), cursor_over(table, tokens, tokens).to(DEVICE)


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("case", GRID, ids=str)
def test_both_halves_over_rows_of_tokens(case: Case) -> None:
    torch.manual_seed(0)
    tiers, keys, values = tiers_of(case)
    queries, lanes = case.rows
    q = torch.randn(lanes, BATCH, HEADS * queries, case.d).to(DEVICE, case.dtype).movedim(0, 2)
    mask = random_mask(case.mask, HEADS * queries, lanes, case.tokens + 1, case.dtype)
    mask = None if mask is None else mask.to(DEVICE)
    expected = expected_logits(case, q, mask, tiers, keys)
    rows, lse = queries * lanes, torch.logsumexp(expected * math.log(2), -1) / math.log(2)
    tiers, cursor = shuffled(tiers, case.tokens)
    new = q.new_zeros(BATCH, HEADS, lanes, case.d)
    form = mask_form(mask, BATCH, HEADS * queries, lanes)
    inputs = DecodeInputs(q, new, new, form, cursor, tiers, case.layout, case.d**-0.5, case.softcap)
    tolerance = TOLERANCE[case.dtype] * (4 if case.extra == "centered" else 1)

    logits, base = based_logits(q, HEADS, CAPACITY)
    sums = triton_plain.attend_keys(inputs, logits, base)
    found = whole_rows(logits, base)[..., : case.tokens]
    visible = expected[:, :, :1] > -math.inf
    torch.testing.assert_close(found[:, :, :rows], expected, atol=4 * tolerance, rtol=tolerance)
    assert torch.equal(found[:, :, rows:].isfinite(), visible.expand_as(found[:, :, rows:]))
    torch.testing.assert_close(log_sum(sums, rows), lse, atol=4 * tolerance, rtol=tolerance)

    write_kept(padded(expected), logits, base)
    sums = triton_plain.attend_values(inputs, logits, base, lse.float(), None)
    weights = (expected - lse.unsqueeze(-1)).exp2()
    torch.testing.assert_close(output(sums, rows)[..., : case.d], weights @ values, atol=tolerance, rtol=tolerance)
    whole = sums.totals.view(BATCH, HEADS, -1, sums.totals.shape[2]).sum(2)[..., :rows].double()
    torch.testing.assert_close(whole, torch.ones_like(whole), atol=2e-3, rtol=0.0)


def test_records_of_small_weights_are_skipped() -> None:
    torch.manual_seed(0)
    case = Case(d=16, tokens=192, rows=(1, 1))
    tiers, _, values = tiers_of(case)
    tiers, cursor = shuffled(tiers, case.tokens)
    q = torch.zeros(BATCH, HEADS, 1, case.d, device=DEVICE)
    inputs = DecodeInputs(q, q, q, mask_form(None, BATCH, HEADS, 1), cursor, tiers, case.layout, 1.0, None)
    logits, base = based_logits(q, HEADS, CAPACITY)
    expected = torch.full((BATCH, HEADS, 1, case.tokens), -9.0, device=DEVICE, dtype=torch.float64)
    expected[..., RECORD : 2 * RECORD] = -12.0
    expected[0, 0, 0, RECORD + 7] = -10.0  # one weight keeps its record
    write_kept(padded(expected), logits, base)
    lse = torch.zeros(BATCH, HEADS, 1, device=DEVICE)
    sums = triton_plain.attend_values(inputs, logits, base, lse, -10.5)
    weights = expected.exp2()
    weights.view(BATCH * HEADS, -1)[1:, RECORD : 2 * RECORD] = 0
    total = sums.totals.view(BATCH, HEADS, -1, sums.totals.shape[2]).sum(2)[..., :1]
    torch.testing.assert_close(total.double(), weights.sum(-1), atol=1e-6, rtol=1e-6)
    expected = weights @ values / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(output(sums, 1)[..., : case.d], expected, atol=1e-5, rtol=1e-5)
