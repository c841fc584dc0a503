"""The keys' half of attention over random codes, interpreted without a GPU, against float64."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kept_fixture import Named, logits_by_token, random_mask
from record_fixture import dim_of, in_pages, levels_of, param_place

from specache_compile.kernels.attention.kept_logits import based_logits
from specache_compile.kernels.codes.params import read_params, read_scale
from specache_compile.kernels.decode.triton_decode import DecodeInputs, mask_form
from specache_compile.kernels.decode.triton_keys import attend_keys
from specache_compile.kernels.state.center import share_of_center
from specache_compile.kernels.state.layout import Layout, hadamard, rotation_block
from specache_compile.kernels.state.stored_tiers import StoredTiers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, SINKS = 2, 3


@dataclass(frozen=True)
class Case(Named):
    """Random codes of a layer, and a step's query.

    lengths: low-bit tokens of each row of the batch.
    center: rows of the keys' center.
    """

    bits: int = 2
    trellis: bool = False
    d: int = 64
    group: int = 64
    eight: bool = True
    dtype: torch.dtype = torch.float16
    rotate: bool = False
    queries: int = 2
    lanes: int = 1
    softcap: float | None = None
    center: int = 0
    mask: str = ""
    sinks: bool = True
    lengths: tuple[int, ...] = (256, 128)
    capacity: int = 256


BF16, FP32 = torch.bfloat16, torch.float32
QUICK = [
    Case(),
    Case(d=128, lanes=2, queries=4, mask="padding", lengths=(448, 64), capacity=512),
    Case(bits=1, d=64, group=32, lengths=(96, 224), queries=3, center=4),
    Case(bits=4, d=32, group=128, softcap=3.0, dtype=FP32),
    Case(bits=1, trellis=True, d=128, rotate=True, center=3, lengths=(192, 256)),
    Case(bits=1, trellis=True, d=16, dtype=FP32, center=3, softcap=5.0, group=32, lengths=(96, 256), sinks=False),
    Case(d=80, rotate=True, eight=False, mask="bool", queries=5, lanes=2, group=32, lengths=(32, 160)),
    Case(bits=1, d=16, dtype=FP32, eight=False, mask="additive", queries=9, lanes=2, group=128),
]
SLOW = [
    Case(bits=4, d=256, lengths=(64, 128)),
    Case(bits=4, d=64, rotate=True, eight=False, dtype=FP32, mask="padding", group=32, lengths=(160, 96)),
    Case(d=256, queries=8, rotate=True, group=128, center=4, softcap=2.0),
    Case(bits=2, d=16, queries=1, mask="bool", softcap=2.0),
    Case(bits=1, d=32, queries=7, mask="additive", center=4),
    Case(bits=1, d=128, eight=False, queries=8, lanes=3, mask="padding", sinks=False),
    Case(bits=1, trellis=True, d=64, eight=False, mask="bool", queries=6, lanes=2),
    Case(bits=1, trellis=True, d=256, mask="padding", group=128, dtype=FP32, lengths=(128, 256)),
    Case(bits=1, trellis=True, d=96, mask="additive", center=4, rotate=True, group=32, lengths=(224, 96)),
    Case(d=32, dtype=FP32, rotate=True, mask="additive", lengths=(192, 64)),
]


class Layer:
    """Tiers with random codes and parameters, and their keys in float64, without their center."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        batch, dim = len(case.lengths), dim_of(case.d)
        width, records = dim * (case.bits + 1) // 8, case.capacity // 64
        codes = torch.randint(0, 256, (batch, HEADS, case.capacity, width), dtype=torch.uint8)
        part = codes.view(batch, HEADS, records, 64 * width)[..., : 8 * dim * case.bits]
        levels = levels_of(part, dim, case.bits, case.trellis, values=False).double() - 1.5 * case.trellis
        shape = (batch, HEADS, case.capacity // case.group, *((1, case.group) if case.trellis else (2, dim)))
        kind = torch.uint8 if case.eight else case.dtype
        if case.eight:  # scales around 1, zero points of either sign
            params = torch.cat([torch.randint(*ends, (*shape[:3], 1, shape[4])) for ends in ((88, 124), (0, 256))], 3)
        else:
            params = torch.cat([torch.rand(*shape[:3], 1, shape[4]) + 0.1, torch.randn(*shape[:3], 1, shape[4])], 3)
        params = params[..., : shape[3], :].to(kind)
        if case.trellis:
            scale = read_scale(params).double().view(batch, HEADS, -1, 64, 1)
            keys = levels * scale
        else:
            scale, zero = (x.double() for x in read_params(*params.unbind(3)))
            place = param_place(torch.arange(dim), dim)
            scale, zero = (x[..., place].repeat_interleave(case.group, 2) for x in (scale, zero))
            keys = levels * scale.view_as(levels) + zero.view_as(levels)
        # Undefined after the last token.
        for row, length in enumerate(case.lengths):
            params[row, :, -(-length // case.group) :] = 255 if case.eight else math.nan
        self.keys = keys.flatten(2, 3)[..., : case.d]
        center = torch.randn(batch, HEADS, case.center, case.d)
        center[:, :, 3:] = 0
        cursor = torch.zeros(batch, 4, dtype=torch.int64)
        lengths = torch.tensor(case.lengths)
        cursor[:, 0], cursor[:, 1], cursor[:, 2] = lengths + 5, lengths, lengths
        table = torch.randperm(batch * case.capacity // 256).view(batch, -1) + 1
        codes, params = in_pages(codes, table), in_pages(params, table)
        cursor = torch.cat([cursor, table], 1)
        sinks = torch.tensor([[0, 70, 2], [-1, 1, -1]], dtype=torch.int32)[:, None]
        self.sinks = sinks if case.sinks else sinks[..., :0]
        empty = codes.new_zeros(0)
        tiers = StoredTiers(codes, params, empty, center, empty, self.sinks, empty)
        self.tiers = StoredTiers(*(x.to(DEVICE) for x in tiers))
        self.cursor, self.center = cursor.to(DEVICE), center


def expected_logits(case: Case, layer: Layer, q: Tensor, mask: Tensor | None) -> Tensor:
    """Return the logits [B, H, G, lanes, C] in float64 and natural units; undefined after the last token."""
    grouped = q.double().unflatten(1, (HEADS, -1)) * case.d**-0.5
    rotated = grouped
    if case.rotate:
        block = rotation_block(case.d)
        matrix = hadamard(block, torch.device("cpu")).double()
        rotated = (grouped.unflatten(-1, (-1, block)) @ matrix).flatten(-2)
    logits = torch.einsum("bhgld,bhtd->bhglt", rotated, layer.keys)
    if case.center:
        logits = logits + share_of_center(grouped.float(), layer.center, case.group, case.capacity).double()
    if case.softcap is not None:
        logits = torch.tanh(logits / case.softcap) * case.softcap
    if mask is not None:
        mask = torch.nn.functional.pad(mask, (0, case.capacity))[..., : case.capacity]
        mask = mask.unflatten(1, (HEADS, -1)) if mask.shape[1] > 1 else mask.unsqueeze(1)
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask.double()
    for row, sinks in enumerate(layer.sinks[:, 0].tolist()):
        for token in sinks:
            if token >= 0:
                logits[row, ..., token] = -math.inf
    return logits


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str)
def test_keys_against_float64(case: Case) -> None:
    layer, batch, rows = Layer(case), len(case.lengths), case.queries * case.lanes
    q = torch.randn(case.lanes, batch, HEADS * case.queries, case.d).to(case.dtype).movedim(0, 2)
    mask = random_mask(case.mask, HEADS * case.queries, case.lanes, max(case.lengths) + 6, case.dtype)
    form = mask_form(None if mask is None else mask.to(DEVICE), batch, HEADS * case.queries, case.lanes)
    layout, scale = Layout(case.bits, 1, case.rotate), case.d**-0.5
    given = q.to(DEVICE)
    inputs = DecodeInputs(given, given, given, form, layer.cursor, layer.tiers, layout, scale, case.softcap)
    logits, base = based_logits(given, HEADS, case.capacity)
    logits.fill_(math.nan)
    base.fill_(math.nan)
    sums = attend_keys(inputs, logits, base)
    expected = expected_logits(case, layer, q, mask).flatten(2, 3)
    found = logits_by_token(logits, base, rows).cpu()
    low = case.dtype != torch.float32
    for row, length in enumerate(case.lengths):
        here, right = found[row, ..., :length], expected[row, ..., :length]
        assert torch.equal(here.isinf(), right.isinf())
        seen = ~right.isinf()
        # Half precision rounds q's scaled channels and the offsets from a base.
        spread = float(right[seen].max() - right[seen].min())
        torch.testing.assert_close(here[seen], right[seen], atol=(1e-3 if low else 2e-6) * spread, rtol=1e-6)
        assert found[row, ..., length : -(-length // 64) * 64].isneginf().all()
    lse = (sums.peaks + sums.totals.log2()).double().cpu() * math.log(2)
    for row, length in enumerate(case.lengths):
        of_row = lse.unflatten(0, (batch, HEADS))[row, ..., :rows].logsumexp(1)
        right = expected[row, ..., :length].logsumexp(-1)
        torch.testing.assert_close(of_row, right, atol=5e-3 if low else 1e-5, rtol=1e-6)


def test_a_split_without_tokens_has_no_peak() -> None:
    case = Case(lengths=(64, 0), capacity=1024, sinks=False)
    layer = Layer(case)
    q = torch.randn(2, HEADS * case.queries, 1, case.d, dtype=torch.float16, device=DEVICE)
    form = mask_form(None, 2, HEADS * case.queries, 1)
    inputs = DecodeInputs(q, q, q, form, layer.cursor, layer.tiers, Layout(2, 1, 0), 0.1, None)
    sums = attend_keys(inputs, *based_logits(q, HEADS, case.capacity))
    assert sums.peaks.shape[1] > 1
    assert sums.peaks[:HEADS, 1:].isneginf().all()
    assert sums.peaks[HEADS:].isneginf().all()
    assert (sums.totals[HEADS:] == 0).all()


def test_the_loop_has_no_shared_memory_and_few_instructions() -> None:
    """Another kWidth of Triton would send the operands of the products through shared memory."""
    script = Path(__file__).parents[2] / "tools" / "compile_kernels.py"
    command = [sys.executable, str(script), "--for=90", "--only=score_keys the default, d 128"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("sm_90 score_keys")]
    assert " 0 B shared" in line
    assert float(line.split(" instructions a number")[0].split()[-1]) <= 1.5
