"""The values' half of attention over random codes, interpreted without a GPU, against float64."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kept_fixture import Named, whole_rows, write_kept
from record_fixture import dim_of, in_pages, levels_of

from specache_compile.kernels.attention.kept_logits import based_logits
from specache_compile.kernels.codes.params import read_params, read_scale
from specache_compile.kernels.decode import triton_values
from specache_compile.kernels.decode.triton_decode import DecodeInputs, Sums, mask_form
from specache_compile.kernels.state.layout import Layout
from specache_compile.kernels.state.stored_tiers import StoredTiers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, KEY_BITS = 2, 2
BF16, FP32 = torch.bfloat16, torch.float32
# Relative errors of the whole output. A weight is rounded twice, before and after its scale.
TOLERANCE = {torch.float16: 1e-3, BF16: 6e-3, FP32: 3e-6}


@dataclass(frozen=True)
class Case(Named):
    """Random codes of a layer, and the kept logits of a step.

    lengths: low-bit tokens of each row of the batch.
    """

    bits: int = 1
    trellis: bool = False
    d: int = 64
    group: int = 64
    eight: bool = True
    dtype: torch.dtype = torch.float16
    queries: int = 2
    lanes: int = 1
    lengths: tuple[int, ...] = (256, 128)
    capacity: int = 256

    @property
    def dim(self) -> int:
        return dim_of(self.d)

    @property
    def rows(self) -> int:
        return self.queries * self.lanes


QUICK = [
    Case(trellis=True, d=128, dtype=BF16, lengths=(64, 192)),
    Case(trellis=True, group=32, lengths=(96, 224), queries=3),
    Case(bits=2, d=64, group=32, eight=False, queries=5, lanes=2, lengths=(32, 160)),
    Case(bits=4, d=32, group=128, dtype=FP32, queries=1, lengths=(128, 64)),
    Case(bits=1, d=32, group=32, dtype=BF16, lengths=(64, 96)),
    Case(trellis=True, d=16, dtype=FP32, eight=False, group=32, lengths=(96, 32)),
]
SLOW = [
    Case(),
    Case(trellis=True, d=128, queries=4, lengths=(448, 64), capacity=512),
    Case(bits=2, d=128, group=64, lanes=2),
    Case(bits=1, d=32, group=32, dtype=FP32, queries=9, lanes=2, lengths=(64, 224)),
    Case(bits=4, d=16, eight=False, queries=7),
    Case(bits=4, d=256, lengths=(64, 128)),
    Case(trellis=True, d=256, eight=False, queries=8, lanes=3, group=128),
    Case(trellis=True, d=80, eight=False, lanes=2),
    Case(trellis=True, d=32, queries=6, lanes=2, group=128),
    Case(bits=1, d=128, group=32, eight=False, lengths=(224, 32)),
    Case(bits=1, d=256, group=128, queries=3, dtype=FP32),
    Case(bits=1, d=16, eight=False, lanes=3, group=128),
    Case(bits=2, d=16, dtype=FP32, queries=8, lengths=(192, 64)),
    Case(bits=2, d=32, group=32, lengths=(160, 96), lanes=2),
    Case(bits=2, d=256, queries=2, group=32, dtype=FP32, eight=False, lengths=(96, 64)),
    Case(bits=4, d=64, group=32, queries=12, lengths=(32, 256)),
    Case(bits=4, d=128, group=64, queries=8, lanes=4, eight=False, lengths=(64, 64)),
    *(Case(trellis=True, d=d, dtype=BF16, eight=False) for d in (64, 128)),
    *(Case(bits=bits, d=128, dtype=BF16, eight=eight) for bits, eight in ((1, True), (2, False), (4, True))),
]


class Layer:
    """Tiers with random codes and parameters, and their values in float64."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        batch, dim, records = len(case.lengths), case.dim, case.capacity // 64
        width = dim * (case.bits + KEY_BITS) // 8
        codes = torch.randint(0, 256, (batch, HEADS, case.capacity, width), dtype=torch.uint8)
        part = codes.view(batch, HEADS, records, 64 * width)[..., 8 * dim * KEY_BITS :]
        levels = levels_of(part, dim, case.bits, case.trellis, values=True).flatten(2, 3).double() - 1.5 * case.trellis
        groups = 1 if case.trellis else dim // min(dim, case.group)
        shape = (batch, HEADS, case.capacity, 1, groups)
        if case.eight:  # scales around 1, zero points of either sign
            params = torch.cat([torch.randint(*ends, shape) for ends in ((88, 124), (0, 256))], 3).to(torch.uint8)
        else:
            params = torch.cat([torch.rand(shape) + 0.1, torch.randn(shape)], 3).to(case.dtype)
        if case.trellis:
            params = params[..., :1, :].contiguous()
            scale = read_scale(params).double()[..., 0, 0]
            token = torch.arange(case.capacity)
            self.values = levels * scale[..., token // 4 * 4 + token % 2 * 2 + token % 4 // 2, None]
        else:
            scale, zero = (x.double().repeat_interleave(dim // groups, -1) for x in read_params(*params.unbind(3)))
            self.values = levels * scale + zero
        for row, length in enumerate(case.lengths):  # undefined after the last token
            params[row, :, length:] = 255 if case.eight else math.nan
        cursor = torch.zeros(batch, 4, dtype=torch.int64)
        lengths = torch.tensor(case.lengths)
        cursor[:, 0], cursor[:, 1], cursor[:, 2] = lengths + 5, lengths, lengths
        key_params = codes.new_zeros(batch, HEADS, case.capacity // case.group, 0)
        table = torch.randperm(batch * case.capacity // 256).view(batch, -1) + 1
        codes, params, key_params = (in_pages(x, table) for x in (codes, params, key_params))
        cursor = torch.cat([cursor, table], 1)
        empty = codes.new_zeros(0)
        tiers = StoredTiers(codes, key_params, params, empty, empty, empty, empty)
        self.tiers, self.cursor = StoredTiers(*(x.to(DEVICE) for x in tiers)), cursor.to(DEVICE)


def kept_in_order(case: Case, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return kept logits and base of logits x [B, H, R, C] in log2 units, and the logits that they hold, float64."""
    q = torch.empty(len(case.lengths), HEADS * case.queries, case.lanes, case.d, dtype=case.dtype)
    logits, base = based_logits(q, HEADS, case.capacity)
    write_kept(x, logits, base)
    return logits.to(DEVICE), base.to(DEVICE), whole_rows(logits, base)[:, :, : case.rows]


def random_logits(case: Case, spread: float = 3.0) -> Tensor:
    """Return logits [B, H, R, C], -inf for some tokens; NaN after the last token."""
    x = torch.randn(len(case.lengths), HEADS, case.rows, case.capacity) * spread - 7.0
    x[..., 5:9] = -math.inf
    x[..., 16:32] = -math.inf
    for row, length in enumerate(case.lengths):
        x[row, ..., length:] = math.nan
    return x.double()


def summed(case: Case, layer: Layer, x: Tensor, lse: Tensor, cut: float | None) -> tuple[Tensor, Tensor, Sums]:
    """Return Σ w·v [B, H, R, d] and Σ w [B, H, R] with w = 2^(x - lse) from the kernel, and its sums."""
    logits, base, _ = kept_in_order(case, x)
    batch = len(case.lengths)
    q = torch.zeros(batch, HEADS * case.queries, case.lanes, case.d, dtype=case.dtype, device=DEVICE)
    form, layout = mask_form(None, batch, HEADS * case.queries, case.lanes), Layout(KEY_BITS, case.bits, 0)
    inputs = DecodeInputs(q, q, q, form, layer.cursor, layer.tiers, layout, 1.0, None)
    given = lse.float().unflatten(2, (case.queries, case.lanes)).flatten(1, 2).to(DEVICE)
    sums = triton_values.attend_values(inputs, logits, base, given, cut)
    partial, peaks, totals = (part.double().cpu()[:, :, : case.rows] for part in sums)
    apart = (peaks - lse.flatten(0, 1)[:, None]).exp2()
    out = (partial * apart[..., None]).sum(1).unflatten(0, (batch, HEADS))[..., : case.d]
    return out, (totals * apart).sum(1).unflatten(0, (batch, HEADS)), sums


def expected(case: Case, layer: Layer, x: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return `summed` in float64, from the logits x that the kernel receives."""
    weights = (x - lse[..., None]).exp2().nan_to_num(nan=0.0)
    return weights @ layer.values[..., : case.d], weights.sum(-1)


def lse_of(x: Tensor) -> Tensor:
    """Return the log-sum-exp of logits [..., n] and of other tokens with as much weight, in log2 units."""
    return x.nan_to_num(nan=-math.inf).mul(math.log(2)).logsumexp(-1) / math.log(2) + 1.0


def assert_near(found: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    assert float((found - right).norm() / right.norm()) < TOLERANCE[dtype]


@pytest.fixture
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the interpreter the simulated device's arithmetic in bfloat16."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "device" / "hooks")
    shim = importlib.import_module("simulated_device.bfloat16")
    for name in ("binary_op", "unary_op", "ternary_op", "create_fma", "cast_impl", "create_fp_to_fp", "create_dot"):
        monkeypatch.setattr(shim.InterpreterBuilder, name, getattr(shim.InterpreterBuilder, name))
    shim.install()


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str)
def test_values_against_float64(case: Case) -> None:
    layer, x = Layer(case), random_logits(case)
    lse = lse_of(x)
    right, total = expected(case, layer, kept_in_order(case, x)[2], lse)
    out, weight, _ = summed(case, layer, x, lse, None)
    for row in range(len(case.lengths)):
        assert_near(out[row], right[row], case.dtype)
        assert_near(weight[row], total[row], case.dtype)


SKIPPING = [
    Case(trellis=True, d=16, dtype=FP32, capacity=1024, lengths=(1024, 192), queries=3),
    pytest.param(
        Case(bits=4, d=16, group=32, capacity=1024, lengths=(992, 32), queries=5, lanes=2),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("case", SKIPPING, ids=str)
def test_small_records_are_skipped(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records whose weights are below the cut are left out, and the output stays within the documented bound."""
    monkeypatch.setattr(triton_values, "LOOK", 2)
    layer, x = Layer(case), random_logits(case, spread=1.0)
    rare = torch.rand(len(case.lengths), HEADS, 1, case.capacity // 64) < 0.7
    x = (x.unflatten(3, (-1, 64)) - 16.0 * rare[..., None]).flatten(3)
    x[..., 7 * 64 : 8 * 64] = -math.inf
    lse, cut = lse_of(x), -14.0
    exact = kept_in_order(case, x)[2]
    small = (exact - lse[..., None]).nan_to_num(nan=-math.inf).unflatten(3, (-1, 64)).amax((2, 4), keepdim=True) < cut
    assert 0.4 < float(small.double().mean()) < 1.0
    kept = exact.unflatten(3, (-1, 64)).masked_fill(small, -math.inf).flatten(3)
    right, total = expected(case, layer, kept, lse)
    out, weight, _ = summed(case, layer, x, lse, cut)
    assert_near(out, right, case.dtype)
    assert_near(weight, total, case.dtype)
    # Other tokens, of values 0, have half of the whole weight.
    whole = expected(case, layer, exact, lse)[0]
    tokens, largest = torch.tensor(case.lengths), layer.values.nan_to_num(nan=0.0).abs().amax((1, 2, 3))
    bound = 2 * tokens * 2.0**cut * largest
    error = (out / (weight[..., None] + 0.5) - whole).abs().amax((1, 2, 3))
    assert (error < bound).all()


def test_nothing_is_skipped_at_the_lowest_cut() -> None:
    case = Case(trellis=True, d=16, dtype=FP32, lengths=(256, 64), queries=3)
    layer, x = Layer(case), random_logits(case)
    lse = lse_of(x)
    for one, other in zip(summed(case, layer, x, lse, -1e4)[2], summed(case, layer, x, lse, None)[2], strict=True):
        assert torch.equal(one, other)


def test_a_split_without_tokens_has_no_peak() -> None:
    case = Case(lengths=(64, 0), capacity=1024)
    layer, x = Layer(case), torch.zeros(2, HEADS, case.rows, 1024, dtype=torch.double)
    sums = summed(case, layer, x, torch.full((2, HEADS, case.rows), 6.0, dtype=torch.double), None)[2]
    assert sums.peaks.shape[1] > 1
    assert sums.peaks[:HEADS, 1:].isneginf().all()
    assert sums.peaks[HEADS:].isneginf().all()
    assert (sums.partial[HEADS:] == 0).all()


def test_a_hidden_row_has_no_weight() -> None:
    """Its log-sum-exp is infinite."""
    case = Case(bits=2, dtype=FP32, d=16, lengths=(64, 128))
    layer, x = Layer(case), torch.full((2, HEADS, case.rows, 256), -math.inf, dtype=torch.double)
    lse = torch.full((2, HEADS, case.rows), math.inf, dtype=torch.double)
    for cut in (None, -10.0):
        sums = summed(case, layer, x, lse, cut)[2]
        assert sums.peaks.isneginf().all()
        assert (sums.partial == 0).all()
