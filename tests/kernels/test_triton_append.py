"""The Triton append's low-bit tier: number by number at the places of the formulas, and equal to the definition's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from record_fixture import dim_of, levels_of, param_place

import pairwise
from held_tiers import adjacent, cursor_over
from specache_compile.kernels.codes.params import read_params, read_scale
from specache_compile.kernels.movement import tier_ops, triton_append
from specache_compile.kernels.state.center import centers
from specache_compile.kernels.state.layout import Layout, rotated, rotation_block
from specache_compile.kernels.state.page_table import PAGE, rows_read
from specache_compile.kernels.state.stored_tiers import StoredTiers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, CAPACITY, RESIDUAL = 1, 512, 32


@dataclass(frozen=True)
class Case:
    """Groups of each row leave the window. bits: of keys and values; 0: one bit in the trellis code.

    extra: "left out" (padding and sinks), "odd numbers" (not finite, or constant) or "".
    """

    bits: tuple[int, int] = (2, 0)
    d: int = 64
    group: int = 64
    eight: bool = False
    dtype: torch.dtype = torch.float32
    rotate: bool = False
    center: bool = False
    extra: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in vars(self).items())

    @property
    def rows(self) -> int:
        """Return the rows of the batch, and the groups of a row that leave; one if the interpreter is slow."""
        return 1 if 0 in self.bits or self.rotate or self.center else 2

    @property
    def leaving(self) -> int:
        """Return the number of tokens that leave the window."""
        return self.rows * self.group

    @property
    def dim(self) -> int:
        return dim_of(self.d)

    @property
    def is_exact(self) -> bool:
        """Return whether all sums are exact in any order: small multiples of eighths, and an exact square root."""
        return not self.center and (not self.rotate or rotation_block(self.d) in (16, 64, 256))


AXES = {
    "bits": [(1, 1), (4, 2), (8, 8), (2, 4)], "d": [16, 64, 80], "group": [32, 64, 128], "eight": [False, True],
    "dtype": [torch.float32, torch.float16], "rotate": [False, True], "center": [False, True],
    "extra": ["", "left out", "odd numbers"],
}  # fmt: skip
GRID = [Case(*values) for values in itertools.product(*AXES.values())]
# A number that is not finite spreads in a rotation.
GRID = [case for case in GRID if case.extra != "odd numbers" or not (case.rotate or case.center)]
CASES = [
    *(GRID[place] for place in pairwise.chosen([{"case": case} for case in GRID])),
    Case(d=16, group=32, rotate=True), Case(d=64, extra="left out"), Case(d=32, extra="odd numbers"),
    Case((2, 0), d=80, group=128, eight=True, dtype=torch.float16, rotate=True),
    Case((0, 0), d=16, group=32, center=True), Case((0, 4), d=64, eight=True, rotate=True, center=True),
    Case((0, 0), d=80, dtype=torch.float16, rotate=True, center=True), Case((0, 1), d=128, group=128, center=True),
]  # fmt: skip


class State:
    """The state before the append, with the new pairs; `tier` tensors are what an append writes."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(0)
        (key_bits, value_bits), dim, group = case.bits, case.dim, case.group
        self.layout = Layout(key_bits or 1, value_bits or 1, case.rotate)
        self.first = torch.tensor([group, 2 * group][: case.rows])
        rows, count = case.rows, case.leaving + RESIDUAL
        pairs = torch.randn(rows, HEADS, count, 2, case.d, generator=generator)
        pairs = pairs * (torch.rand(case.d, generator=generator) + 0.2)
        if case.is_exact:
            pairs = (pairs * 8).round() / 8
        if case.extra == "odd numbers":
            pairs[0, 0, 3, 0, 5], pairs[0, 0, 4, 1, 7], pairs[0, 0, 8, :, 9] = float("inf"), -float("inf"), float("nan")
            pairs[0, 0, group:], pairs[0, 0, :, 0, 3], pairs[0, 0, 5, 1] = 2.5, float("nan"), 0.0
        self.pairs = pairs.to(case.dtype)
        self.held = RESIDUAL + group // 2  # tokens of the window before the append
        window = RESIDUAL + group
        self.recent = torch.full((rows, HEADS, window, 2, case.d), float("nan"), dtype=case.dtype)
        for row, start in enumerate(self.first.tolist()):
            self.recent[row, :, torch.arange(start, start + self.held) % window] = self.pairs[row, :, : self.held]
        self.table = torch.tensor([[3, 1], [4, 2]][:rows])
        self.cursor = cursor_over(self.table)
        self.cursor[:, 0], self.cursor[:, 1], self.cursor[:, 2] = (
            self.first + self.held, self.first, self.first + case.leaving,
        )  # fmt: skip
        params, nothing = (torch.uint8, 255) if case.eight else (case.dtype, float("nan"))
        key_params = (2, dim) if key_bits else (1, group)
        value_params = (2, dim // min(dim, group)) if value_bits else (1, 1)
        self.tier = {
            "codes": torch.full((5, HEADS, PAGE, self.layout.width(case.d)), 255, dtype=torch.uint8),
            "key_params": torch.full((5, HEADS, PAGE // group, *key_params), nothing, dtype=params),
            "value_params": torch.full((5, HEADS, PAGE, *value_params), nothing, dtype=params),
        }
        center_rows = (4 if key_bits else 3) if case.center else 0
        self.center = torch.randn(rows, HEADS, center_rows, case.d, generator=generator)
        self.sink_index = torch.empty(rows, 1, 0, dtype=torch.int32)
        if case.extra == "left out":
            self.sink_index = (self.first[:, None, None] + torch.tensor([2, 3, group + 1])).int()
            self.sink_index[0, 0, 1] = -1
        self.sink_pairs = torch.full((rows, HEADS, self.sink_index.shape[2], 2, case.d), 9.0, dtype=case.dtype)
        self.padding = None
        if case.extra == "left out":
            self.padding = (torch.arange(CAPACITY) % 5 > 0).expand(rows, 1, 1, -1).contiguous()

    def appended(self, append: Callable[..., None]) -> dict[str, Tensor]:
        """Return what `append` makes of the tensors that it mutates, rows of pages put together."""
        apart = {"center": self.center, "sink_pairs": self.sink_pairs, "recent": self.recent}
        written = {name: x.to(DEVICE, copy=True) for name, x in {**self.tier, **apart}.items()}
        k, v = self.pairs[:, :, self.held :].to(DEVICE).unbind(3)
        padding = None if self.padding is None else self.padding.to(DEVICE)
        cursor, sink_index = self.cursor.to(DEVICE), self.sink_index.to(DEVICE)
        append(k, v, padding, cursor, *StoredTiers(**written, sink_index=sink_index), *self.layout, "midpoint")
        assert (written["codes"][0] == 255).all()
        written |= {name: rows_read(written[name], self.table) for name in self.tier}
        return {name: x.cpu() for name, x in written.items()}

    def leaving(self, x: Tensor, per: int = 1) -> Tensor:
        """Return the part [B, H, n, ...] of rows [B, H, C / per, ...] of the tokens that have left the window."""
        count = self.case.leaving // per
        parts = [x[row, :, start // per : start // per + count] for row, start in enumerate(self.first.tolist())]
        return torch.stack(parts)

    def others(self, x: Tensor) -> Tensor:
        """Return x [B, H, C, ...] without the tokens that have left the window, [n, H, ...]."""
        token, first = torch.arange(CAPACITY), self.first[:, None]
        return x.transpose(1, 2)[(token < first) | (token >= first + self.case.leaving)]

    @property
    def exact(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, H, n, d] that are quantised, float64."""
        group, first = self.case.group, int(self.first[0]) // self.case.group
        keys, values = self.pairs[:, :, : self.case.leaving].double().unbind(3)
        if self.case.center:  # one row, one group
            keys = keys - centers(self.center, group, first, first + 1)
        if self.case.rotate:
            keys, values = rotated(keys).double(), rotated(values).double()
        return keys, values


def read_levels(case: Case, codes: Tensor, values: bool) -> Tensor:
    """Return the levels int64 [B, H, C, D] of codes uint8 [B, H, C, w]."""
    dim, bits = case.dim, case.bits[values] or 1
    records = codes.unflatten(2, (-1, 64)).flatten(3)
    part = records[..., -8 * dim * bits :] if values else records[..., : 8 * dim * bits]
    if bits == 8:
        return part.reshape(case.rows, HEADS, CAPACITY, dim).long()
    return levels_of(part, dim, bits, not case.bits[values], values).flatten(2, 3)


def params_of(state: State, written: dict[str, Tensor], values: bool) -> tuple[Tensor, Tensor]:
    """Return scale and zero point, float64, of each leaving number, [B, H, n, D]."""
    case, dim, tokens = state.case, state.case.dim, state.case.leaving
    params = state.leaving(written["value_params" if values else "key_params"], 1 if values else case.group)
    if params.shape[3] == 1:
        scale = read_scale(params).double().reshape(case.rows, HEADS, tokens)
        if values:
            scale = scale.unflatten(2, (-1, 4))[..., [0, 2, 1, 3]].flatten(2)
        scale = scale.unsqueeze(-1).expand(-1, -1, -1, dim)
        return scale, -1.5 * scale
    scale, zero = (x.double() for x in read_params(*params.unbind(3)))
    if values:
        return tuple(x.repeat_interleave(dim // x.shape[3], 3) for x in (scale, zero))
    channel = torch.arange(dim)
    if case.bits[0] < 8:
        channel = param_place(channel, dim)
    return tuple(x[..., channel].repeat_interleave(case.group, 2) for x in (scale, zero))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_writes_what_the_definition_writes(case: Case) -> None:
    state = State(case)
    ours, expected = state.appended(triton_append.append), state.appended(tier_ops.append)
    for name in ("recent", "center", "sink_pairs", *(state.tier if case.is_exact and 0 not in case.bits else ())):
        torch.testing.assert_close(ours[name], expected[name], rtol=0, atol=0, equal_nan=True)
    for values, exact in enumerate(state.exact):
        levels = [read_levels(case, written["codes"], bool(values)) for written in (ours, expected)]
        assert torch.equal(*(state.others(x) for x in levels))
        params = [params_of(state, written, bool(values)) for written in (ours, expected)]
        found, target = ((state.leaving(x) * s + z)[..., : case.d] for x, (s, z) in zip(levels, params, strict=True))
        scale = params[1][0][..., : case.d]
        if case.bits[values]:
            assert_in_the_same_levels(found, target, scale)
        else:
            assert_on_paths_as_near(found, target, exact, torch.finfo(case.dtype).eps)
        if case.dtype == torch.float32 and not case.eight and not case.extra:
            assert_near(found, exact, scale, case.bits[values])


def assert_in_the_same_levels(found: Tensor, target: Tensor, scale: Tensor) -> None:
    """Allow the next level in rare cases: a rotation's sums have another order, and a number may be at a border."""
    moved = (found - target).abs() / scale.clamp_min(1e-3)
    assert (moved > 0.1).float().mean() < 1e-3
    assert moved.max() < 1.1


def assert_on_paths_as_near(found: Tensor, target: Tensor, exact: Tensor, eps: float) -> None:
    """Require trellis codes to be equal up to the last bit, except for circles with two equally near paths."""
    exact = exact.nan_to_num(0.0, 0.0, 0.0)
    same = ((found - target).abs() <= 16 * eps * target.abs()).all(-1)
    assert same.float().mean() > 0.95
    off, expected = (((x - exact) ** 2).sum(-1) for x in (found, target))
    torch.testing.assert_close(off, expected, rtol=0.2, atol=0)


def assert_near(found: Tensor, exact: Tensor, scale: Tensor, bits: int) -> None:
    """In levels: at most half a step away. In the trellis code: unbiased, with a cosine of at least 0.78."""
    if bits:
        assert ((found - exact).abs() <= scale * 0.5001 + 1e-5).all()
        assert exact.abs().amax() > 2 * scale.amin()  # the bound means something
    else:
        torch.testing.assert_close((found * exact).sum(-1), (exact * exact).sum(-1), rtol=1e-4, atol=1e-6)
        assert ((found - exact) ** 2).sum() < 0.64 * (exact * exact).sum()


@pytest.mark.parametrize(("d", "rotate"), [(8, False), (64, True)])
def test_unquantised_pairs_are_copied_as_they_are(d: int, rotate: bool) -> None:
    """Neither rotated nor centered; only whole groups leave the window, as many in each row as its cursor states."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 3, HEADS, 70, d, generator=generator).to(DEVICE)
    recent, center = torch.randn(3, HEADS, 96, 2, d, generator=generator), torch.ones(3, HEADS, 4, d)
    lengths = torch.tensor([[50, 0, 64, 0], [90, 64, 128, 0], [20, 0, 0, 0]])
    cursor = torch.cat([lengths, adjacent(3, CAPACITY)], 1).to(DEVICE)
    pages, found = len(cursor) * CAPACITY // PAGE, []
    params, empty = torch.zeros(pages, HEADS, 0, 2, d), torch.zeros(3, HEADS, 0, 2, d)
    for append in (triton_append.append, tier_ops.append):
        codes = torch.full((pages, HEADS, PAGE, 2 * d), 7.0)
        given = StoredTiers(codes, params, params, center, empty, torch.zeros(3, 1, 0, dtype=torch.int32), recent)
        given = StoredTiers(*(x.to(DEVICE, copy=True) for x in given))
        append(k, v, None, cursor, *given, 16, 16, rotate, "midpoint")
        found.append((given.recent, given.codes))
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)
