"""Attention over the 16-bit pairs, interpreted without a GPU, against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kept_fixture import Named, random_mask, whole_rows

from held_tiers import adjacent, cursor_over
from specache_compile.kernels.attention.kept_logits import based_logits
from specache_compile.kernels.decode.triton_decode import DecodeInputs, mask_form
from specache_compile.kernels.decode.triton_exact import attend_exact
from specache_compile.kernels.state.layout import Layout
from specache_compile.kernels.state.stored_tiers import StoredTiers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH, HEADS, CAPACITY, LOW_BIT, WINDOW = 2, 2, 256, 96, 64
FP32 = torch.float32
TOLERANCE = {torch.float16: 2e-3, FP32: 3e-6}


@dataclass(frozen=True)
class Case(Named):
    """A step's query and mask, and what the cache holds.

    ring: tokens after the low-bit tier. leaving: of these, the tokens that leave the ring in the step.
    """

    d: int = 16
    dtype: torch.dtype = torch.float16
    queries: int = 2
    lanes: int = 1
    mask: str = ""
    softcap: float | None = None
    values: bool = True
    kept: bool = True
    top_k: int = 20
    sinks: int = 3
    ring: int = 40
    leaving: int = 32


QUICK = [
    Case(d=80, lanes=3, queries=3, mask="padding", sinks=17, kept=False),
    Case(dtype=FP32, values=False, lanes=2, mask="bool", softcap=3.0),
    Case(dtype=FP32, queries=1, mask="additive", softcap=2.0, ring=0, leaving=0, top_k=33),
]
SLOW = [
    Case(),
    Case(values=False, queries=9, lanes=2, mask="padding", sinks=0, ring=64, leaving=64),
    Case(d=40, dtype=FP32, lanes=2, mask="bool", top_k=0, kept=False, ring=5, leaving=0),
    Case(values=False, mask="additive", sinks=0, kept=False, lanes=3, ring=17, leaving=0),
]


@dataclass(frozen=True)
class Parts:
    """Pairs [B, H, n, 2, d] in float64, their tokens [B, H, n] (-1: none), and which are the lanes' own [n]."""

    pairs: Tensor
    tokens: Tensor
    lane: Tensor


def logits_of(case: Case, q: Tensor, parts: Parts, mask: Tensor | None) -> Tensor:
    """Return the logits [B, H, R, n] in log2 units."""
    grouped = q.double().unflatten(1, (HEADS, -1))
    x = torch.einsum("bhgld,bhtd->bhglt", grouped, parts.pairs[..., 0, :]) * case.d**-0.5
    if case.softcap is not None:
        x = torch.tanh(x / case.softcap) * case.softcap
    hidden = (parts.tokens < 0)[:, :, None, None] | (parts.lane > torch.arange(case.lanes)[:, None])
    if mask is not None:
        full = mask.expand(BATCH, HEADS * case.queries, case.lanes, -1).unflatten(1, (HEADS, -1))
        bias = full.gather(-1, parts.tokens.clamp_min(0)[:, :, None, None].expand(x.shape))
        if mask.dtype == torch.bool:
            hidden = hidden | ~bias
        else:
            x = x + bias.double()
    return x.masked_fill(hidden, -math.inf).flatten(2, 3) / math.log(2)


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str)
def test_pairs_against_float64(case: Case) -> None:
    torch.manual_seed(0)
    length = LOW_BIT + case.ring
    q, k, v = (
        torch.randn(case.lanes, BATCH, heads, case.d).to(case.dtype).movedim(0, 2)
        for heads in (HEADS * case.queries, HEADS, HEADS)
    )
    recent, sink_pairs, slots = (
        torch.randn(BATCH, HEADS, count, 2, case.d).to(case.dtype) for count in (WINDOW, case.sinks, case.top_k)
    )
    order = torch.rand(BATCH, HEADS, LOW_BIT).argsort(-1).int()
    sink_index = torch.arange(case.sinks, dtype=torch.int32).expand(BATCH, 1, -1).contiguous()
    sink_index[1, :, 1:] = -1
    slot_index = order[..., : case.top_k].contiguous()
    slot_index[..., 3:5] = -1
    slots[:, :, 3:5] = math.nan  # empty slots are undefined
    mask = random_mask(case.mask, HEADS * case.queries, case.lanes, length + 1, case.dtype)
    cursor = cursor_over(adjacent(BATCH, CAPACITY), length, LOW_BIT, LOW_BIT + case.leaving)
    empty = torch.zeros(BATCH, HEADS, CAPACITY, 0, dtype=torch.uint8)
    tiers = StoredTiers(empty, empty, empty, empty, sink_pairs, sink_index, recent)
    form = mask_form(None if mask is None else mask.to(DEVICE), BATCH, HEADS * case.queries, case.lanes)
    on_device = [x.to(DEVICE) for x in (q, k, v)]
    inputs = DecodeInputs(
        *on_device, form, cursor.to(DEVICE), StoredTiers(*(x.to(DEVICE) for x in tiers)), Layout(2, 1, 0),
        case.d**-0.5, case.softcap,
    )  # fmt: skip
    logits, base = based_logits(on_device[0], HEADS, CAPACITY)
    logits.fill_(math.nan)
    base.fill_(2.0)
    kept = (logits, base) if case.kept else None
    sums = attend_exact(inputs, slots.to(DEVICE), slot_index.to(DEVICE), case.values, kept)

    ring = torch.arange(LOW_BIT, length)
    new = torch.stack([k, v], 3)
    shown = case.top_k if case.values else 0
    parts = Parts(
        torch.cat([slots[:, :, :shown], recent[:, :, ring % WINDOW], new, sink_pairs], 2).double().nan_to_num(nan=0.0),
        torch.cat(
            [
                slot_index[..., :shown].long(), ring.expand(BATCH, HEADS, -1),
                torch.full((BATCH, HEADS, case.lanes), length), sink_index.long().expand(-1, HEADS, -1),
            ],
            -1,
        ),
        torch.cat([torch.zeros(shown + case.ring), torch.arange(case.lanes), torch.zeros(case.sinks)]),
    )  # fmt: skip
    x = logits_of(case, q, parts, mask)
    rows, tolerance = x.shape[2], TOLERANCE[case.dtype]
    peak = x.amax(-1)
    partial, peaks, totals = (part.double().cpu().unflatten(0, (BATCH, HEADS))[:, :, :, :rows] for part in sums)
    apart = (peaks - peak[:, :, None]).exp2()
    weights = (x - peak[..., None]).exp2()
    torch.testing.assert_close((totals * apart).sum(2), weights.sum(-1), atol=0, rtol=tolerance)
    if case.values:
        out = (partial * apart[..., None]).sum(2)
        torch.testing.assert_close(out, weights @ parts.pairs[..., 1, :], atol=10 * tolerance, rtol=tolerance)
    if case.kept:
        check_kept(case, logits.cpu(), base.cpu(), parts, x, shown)


def check_kept(case: Case, logits: Tensor, base: Tensor, parts: Parts, x: Tensor, shown: int) -> None:
    """Require the logits of slots and of the ring's leaving tokens where later kernels read them, and no others."""
    found = whole_rows(logits, base)[:, :, : x.shape[2]]
    count = shown + case.leaving
    tokens = parts.tokens[..., :count]
    right = x.new_full((*found.shape[:3], CAPACITY + 1), math.nan)  # the last column is of empty slots
    where = torch.where(tokens < 0, CAPACITY, tokens)[:, :, None].expand(-1, -1, x.shape[2], -1)
    right.scatter_(-1, where, x[..., :count])
    right = right[..., :CAPACITY]
    torch.testing.assert_close(found, right, atol=20 * TOLERANCE[case.dtype], rtol=0, equal_nan=True)
