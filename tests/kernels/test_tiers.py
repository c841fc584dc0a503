"""The ops that move pairs between tiers, against plain Python models of each tier, for every implementation."""

from __future__ import annotations

import itertools
import math
import random
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from implementations import KINDS, Ops
from kept_fixture import Named
from torch import Tensor

import pairwise
from held_tiers import cursor_over, in_pages
from specache_compile.kernels.codes import trellis
from specache_compile.kernels.codes.params import read_params, read_scale, stored_scale
from specache_compile.kernels.codes.quantize import CHANNELS, TOKENS, quantize
from specache_compile.kernels.codes.records import (
    by_token,
    in_thread_order,
    param_order,
    read_levels,
    stored_dim,
    unpacked,
)
from specache_compile.kernels.movement.tier_ops import padded
from specache_compile.kernels.state.center import centers, set_center
from specache_compile.kernels.state.cursor import LENGTH, LOW_BIT, NEXT_LOW_BIT
from specache_compile.kernels.state.layout import Layout, rotated, rotation_block
from specache_compile.kernels.state.page_table import LOW_BIT_TIER, rows_read

pytestmark = pytest.mark.pairwise

BATCH, HEADS, HEAD_DIM, CAPACITY = 2, 2, 16, 1024
ROWS = (BATCH, HEADS)
# Pages in any order; page 0 belongs to no row.
TABLE = torch.tensor([[3, 8, 1, 6], [7, 2, 5, 4]])
ops: Any = torch.ops.specache
on_cpus = pytest.mark.parametrize("every_implementation", KINDS[:2], indirect=True)
of_definitions = pytest.mark.parametrize("every_implementation", KINDS[:1], indirect=True)


@pytest.fixture(autouse=True, params=KINDS)
def every_implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with every implementation of the ops."""
    monkeypatch.setattr(sys.modules[__name__], "ops", Ops(request.param))


def run(name: str, *given: Any) -> None:
    """Run an op on its implementation's device."""
    moved = [x.to(ops.device) if isinstance(x, Tensor) else x for x in given]
    getattr(ops, name)(*moved)
    for x, there in zip(given, moved, strict=True):
        if isinstance(x, Tensor) and x is not there:
            x.copy_(there)


def random_pairs(tokens: int, seed: int, head_dim: int = HEAD_DIM, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*ROWS, tokens, 2, head_dim, generator=generator).to(dtype)


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


# append and offload


@dataclass(frozen=True)
class Case(Named):
    """A cache's options. left_out: every fifth token is padding. odd: pairs that are not finite, or constant."""

    bits: int = 2
    value_bits: int | None = None
    group: int = 32
    residual: int = 32
    head_dim: int = HEAD_DIM
    dtype: torch.dtype = torch.float32
    zero_point: str = "midpoint"
    rotate: bool = False
    sink_tokens: int = 0
    trellis: bool = False
    key_trellis: bool = False
    eight: bool = False
    center: bool = False
    left_out: bool = False
    odd: bool = False

    @property
    def is_possible(self) -> bool:
        key_bits, value_bits = self.bits, self.value_bits or self.bits
        of_codes = self.value_bits or self.trellis or self.key_trellis or self.eight or self.center or self.left_out
        return not (
            (self.bits == 16 and of_codes)
            or (self.trellis and value_bits > 1) or (self.key_trellis and key_bits > 1)
            or (self.eight and 8 in (key_bits, value_bits)) or (self.center and self.head_dim < 16)
            or (self.odd and (self.rotate or self.center or self.key_trellis or self.trellis))
        )  # fmt: skip

    def is_exact(self, kind: str) -> bool:
        """Return whether levels are equal: sums of eighths are the same in any order, if the square root is exact."""
        rotation = not self.rotate or kind != "triton" or rotation_block(self.head_dim) in (16, 64, 256)
        return not self.center and rotation and not (kind == "triton" and (self.trellis or self.key_trellis))


class Cache:
    """The tiers of a cache, and all pairs that were appended, in order."""

    def __init__(self, case: Case) -> None:
        self.case, d, group = case, case.head_dim, case.group
        self.dim, self.originals = stored_dim(d), list[Tensor]()
        self.size, self.window = min(self.dim, group), case.residual + group
        self.layout = Layout(case.bits, case.value_bits or case.bits, case.rotate)
        self.cursor, rows, dtype, nothing = cursor_over(TABLE), (*ROWS, CAPACITY), case.dtype, math.nan
        self.recent = torch.full((*ROWS, self.window, 2, d), nothing, dtype=dtype)
        # Row b's sinks begin at its token 2·b.
        self.sink_index = (torch.arange(case.sink_tokens) + 2 * torch.arange(BATCH).view(-1, 1, 1)).int()
        self.sink_pairs = torch.full((*ROWS, case.sink_tokens, 2, d), nothing, dtype=dtype)
        self.center = torch.zeros(*ROWS, 3 if case.key_trellis else 4 if case.center else 0, d)
        self.frequencies = 0.8 ** torch.arange(d // 2.0) if case.center else None
        self.there = torch.arange(CAPACITY) % 5 > 0 if case.left_out else torch.ones(CAPACITY, dtype=torch.bool)
        tiers = {"host": torch.full((*rows, 2, d), nothing, dtype=dtype)}
        if case.bits == 16:
            tiers["codes"] = torch.full((*rows, 2 * d), nothing, dtype=dtype)
            tiers["key_params"], tiers["value_params"] = (torch.zeros(*ROWS, 0, 2, d, dtype=dtype) for _ in range(2))
        else:
            tiers["codes"] = torch.full((*rows, self.layout.width(d)), 255, dtype=torch.uint8)
            key_shape = (1, group) if case.key_trellis else (2, self.dim)
            value_shape = (1, 1) if case.trellis else (2, self.dim // self.size)
            dtype, nothing = (torch.uint8, 255) if case.eight else (dtype, nothing)
            tiers["key_params"] = torch.full((*ROWS, CAPACITY // group, *key_shape), nothing, dtype=dtype)
            tiers["value_params"] = torch.full((*rows, *value_shape), nothing, dtype=dtype)
        self.pages = {name: in_pages(x, TABLE).pages for name, x in tiers.items()}

    @property
    def length(self) -> int:
        return sum(pairs.shape[2] for pairs in self.originals)

    def low_bit(self, length: int) -> int:
        return self.case.group * max(0, (length - self.case.residual) // self.case.group)

    def put(self, tokens: int) -> None:
        """Append and offload random pairs, with a session's cursor."""
        pairs = random_pairs(tokens, self.length, self.case.head_dim, torch.float32)
        if self.case.rotate and self.case.is_exact(ops.kind):
            pairs = (pairs * 8).round() / 8  # a rotation's sums are then the same in any order
        if self.case.odd:
            pairs[0, 0, ::3, 0, 5], pairs[0, 0, ::4, 1, 7], pairs[0, 0, ::8, :, 9] = math.inf, -math.inf, math.nan
            pairs[0, 1], pairs[1, 0, :, 0, 3], pairs[1, 1, 0, 1] = 2.5, math.nan, 0.0
        pairs = pairs.to(self.case.dtype)
        self.cursor[:, LENGTH] = self.length
        self.cursor[:, LOW_BIT] = self.low_bit(self.length)
        self.cursor[:, NEXT_LOW_BIT] = self.low_bit(self.length + tokens)
        k, v = pairs.unbind(3)
        low_bit_tier = (self.pages[name] for name in LOW_BIT_TIER)
        padding = self.there.expand(BATCH, 1, 1, -1).contiguous() if self.case.left_out else None
        run(
            "append", k, v, padding, self.cursor, *low_bit_tier, self.center, self.sink_pairs, self.sink_index,
            self.recent, *self.layout, self.case.zero_point, self.frequencies,
        )  # fmt: skip
        run("offload", k, v, None, self.cursor, self.pages["host"])
        self.originals.append(pairs)

    def check(self) -> None:
        n, low_bit, case = self.length, self.low_bit(self.length), self.case
        tiers = {name: rows_read(tier, TABLE) for name, tier in self.pages.items()}
        codes, host = tiers["codes"], tiers["host"]
        assert all((tier[0] == 3).all() for tier in self.pages.values()), "page 0 is no row's"
        truth = torch.cat(self.originals, 2)
        assert_same(host[:, :, :n], truth)
        assert host[:, :, n:].isnan().all()
        newest = torch.arange(low_bit, n)
        assert_same(self.recent[:, :, newest % self.window], truth[:, :, newest])
        if case.bits == 16:
            assert_same(codes[:, :, :low_bit].unflatten(3, (2, -1)), truth[:, :, :low_bit])
            assert codes[:, :, low_bit:].isnan().all()
            return
        keys, values = self.quantised(truth, low_bit).unbind(3)
        others = self.there[:low_bit].repeat(*ROWS, 1)
        for row, tokens in enumerate(self.sink_index[:, 0].tolist()):
            for place, token in enumerate(tokens):
                if token < low_bit:
                    assert_same(self.sink_pairs[row, :, place], host[row, :, token])
                    others[row, :, token] = False
                else:
                    assert self.sink_pairs[row, :, place].isnan().all()
        if not case.key_trellis:  # a key that is there twice changes no range
            for row, token in (~others[:, 0]).nonzero().tolist():
                group = token // case.group * case.group
                keys[row, :, token] = keys[
                    row, :, group + int(others[row, 0, group : group + case.group].nonzero()[-1])
                ]
        dtype, key_bits, value_bits = tiers["key_params"].dtype, self.layout.key_bits, self.layout.value_bits
        if case.key_trellis:
            key_levels, scales = self.in_trellis(keys, values=False)
            key_params = stored_scale(scales, dtype).view(*ROWS, -1, 1, case.group)
        else:
            key_levels, key_params = quantize(padded(keys), TOKENS, case.group, key_bits, case.zero_point, dtype)
            key_params = key_params[..., param_order(self.dim, key_bits)]
        if case.trellis:
            value_levels, scales = self.in_trellis(values, values=True)
            value_params = stored_scale(in_thread_order(scales), dtype)[..., None, None]
        else:
            given = (padded(values), CHANNELS, self.size, value_bits)
            value_levels, value_params = quantize(*given, case.zero_point, dtype)
        for levels, bits, of_values in ((key_levels, key_bits, False), (value_levels, value_bits, True)):
            found = read_levels(codes, self.dim, bits, of_values)
            self.check_levels(
                found[:, :, :low_bit][others], levels[others], case.trellis if of_values else case.key_trellis
            )
            assert (found[:, :, low_bit:] == 2**bits - 1).all()
        groups = low_bit // case.group
        for name, count, expected in (("key_params", groups, key_params), ("value_params", low_bit, value_params)):
            found, untouched = tiers[name][:, :, :count], tiers[name][:, :, count:]
            assert (untouched == 255).all() if case.eight else untouched.isnan().all()
            if case.is_exact(ops.kind):
                assert_same(found, expected)
            else:
                check_params(found, expected)

    def quantised(self, truth: Tensor, low_bit: int) -> Tensor:
        """Return the pairs [B, H, n, 2, d] that become codes: centered and rotated."""
        case, truth = self.case, truth.clone()
        lengths = itertools.accumulate(pairs.shape[2] for pairs in self.originals)
        first = next(filter(None, map(self.low_bit, lengths)), 0)  # the low-bit tier's first keys, from one append
        if case.key_trellis or case.center:
            expected, there = torch.zeros_like(self.center), self.there[None, None, :first, None]
            if first:
                set_center(truth[:, :, :first, 0], there, self.frequencies, expected, case.group)
            torch.testing.assert_close(self.center, expected, rtol=1e-4, atol=1e-5)
            truth = truth[:, :, :low_bit].float()
            truth[:, :, :, 0] -= centers(self.center, case.group, 0, low_bit // case.group)
        return (rotated(truth.float()) if case.rotate else truth).to(case.dtype)[:, :, :low_bit]

    def in_trellis(self, x: Tensor, values: bool) -> tuple[Tensor, Tensor]:
        """Return the bits [B, H, n, D] of keys or values [B, H, n, d], and their scales [B, H, n]."""
        codes, scale = trellis.quantize(x, 0, self.dim, values)
        return by_token(unpacked(codes, 1), self.dim, 1, values)[:, :, : x.shape[2]], scale

    def check_levels(self, found: Tensor, expected: Tensor, in_trellis: bool) -> None:
        """Without exact sums a number may be at a border of levels, and a circle may have two paths as near."""
        if self.case.is_exact(ops.kind):
            assert torch.equal(found, expected)
        elif found.numel():
            away = (found.int() - expected.int()).abs()
            assert away.max() <= 1
            assert (away > 0).float().mean() < (0.1 if in_trellis else 2e-3)


def check_params(found: Tensor, expected: Tensor) -> None:
    """Allow other roundings of parameters, and of a few trellis scales whose paths differ."""
    if found.shape[3] == 1:
        found, expected = (read_scale(x).float() for x in (found, expected))
    else:
        found, expected = (torch.stack(read_params(*x.unbind(3))).float() for x in (found, expected))
    away = (found - expected).abs() > 0.01 * expected.abs() + 1e-3
    assert away.float().mean() < 0.1 if found.numel() else True


AXES: dict[str, list[Any]] = {
    "bits": [1, 2, 4, 8, 16], "value_bits": [None, 1, 2, 4], "group": [32, 64, 128], "residual": [0, 20, 32, 100],
    "head_dim": [16, 64, 80, 128], "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "zero_point": ["midpoint", "minimum", "middles"], "rotate": [False, True], "sink_tokens": [0, 1, 4, 20],
    "trellis": [False, True], "key_trellis": [False, True], "eight": [False, True], "center": [False, True],
    "left_out": [False, True], "odd": [False, False, True],
}  # fmt: skip
chance = random.Random(0)
SAMPLE = [Case(**{name: chance.choice(values) for name, values in AXES.items()}) for _ in range(8_000)]
SAMPLE = [case for case in SAMPLE if case.is_possible]
CASES = [Case(), *(SAMPLE[place] for place in pairwise.chosen([{"case": case} for case in SAMPLE]))]
FOR_TRITON = [case for case in CASES if case.dtype != torch.bfloat16 and case.group * case.head_dim <= 64 * 80]
FOR_TRITON.append(Case(bits=4, group=128, head_dim=256, rotate=True))  # the rotation halves it


@on_cpus
@pytest.mark.parametrize("case", CASES, ids=str)
def test_after_any_appends_each_tier_holds_what_it_should(case: Case) -> None:
    """Sinks are kept as they are and widen no group; a trellis of keys subtracts the mean of the first ones."""
    sizes, cache = random.Random(str(case)), Cache(case)
    for _ in range(8):
        tokens = sizes.choice([1, 1, 2, sizes.randint(3, 40), sizes.randint(41, 150)])
        if cache.length + tokens <= CAPACITY:
            cache.put(tokens)
            cache.check()


@pytest.mark.parametrize("every_implementation", KINDS[2:], indirect=True)
@pytest.mark.pairwise(1)
@pytest.mark.parametrize("case", FOR_TRITON, ids=str)
@pytest.mark.parametrize("launches", ["one", "several"])
def test_after_tritons_appends_each_tier_holds_what_it_should(
    case: Case, launches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups of a long prompt are rotated and encoded in several launches."""
    from specache_compile.kernels.movement import triton_append

    if launches == "several":
        monkeypatch.setattr(triton_append, "SCRATCH", 1)
    cache = Cache(case)
    for tokens in (2 * case.group + 8, 1, case.group - 2):
        cache.put(tokens)
        cache.check()


# select_topk


@pytest.mark.parametrize("k", [1, 16, 64, 100])
@pytest.mark.parametrize(("capacity", "candidates"), [(64, 0), (64, 1), (64, 64), (300, 30), (5000, 4950), (9000, 99)])
def test_the_candidates_of_largest_score_are_selected(capacity: int, candidates: int, k: int) -> None:
    torch.manual_seed(candidates)
    scores = torch.full((*ROWS, capacity), -1.0)
    for row in scores.flatten(0, 1):
        row[torch.randperm(capacity)[:candidates]] = torch.rand(candidates).pow(20)
    selected = torch.full((*ROWS, k), 7, dtype=torch.int32)
    run("select_topk", scores, selected)
    for row, chosen in zip(scores.flatten(0, 1).tolist(), selected.flatten(0, 1).tolist(), strict=True):
        best = sorted((t for t in range(capacity) if row[t] >= 0), key=lambda t: -row[t])[:k]
        assert sorted(chosen) == sorted(best + [-1] * (k - len(best)))


@of_definitions
@pytest.mark.parametrize(("k", "page"), [(16, 4), (18, 4), (64, 7), (5, 5), (4, 1)])
def test_pages_go_by_their_best_token(k: int, page: int) -> None:
    torch.manual_seed(k)
    scores = torch.rand(*ROWS, 60).masked_fill(torch.rand(*ROWS, 60) < 0.4, -1.0)
    scores[..., 50:] = -1.0
    selected = torch.full((*ROWS, k), 7, dtype=torch.int32)
    run("select_pages", scores, selected, page)
    for row, chosen in zip(scores.flatten(0, 1).tolist(), selected.flatten(0, 1).tolist(), strict=True):
        runs = [range(60)[start : start + page] for start in range(0, 60, page)]
        by_best = sorted(runs, key=lambda run: -max(row[t] for t in run))
        best = [t for p in by_best[: k // page] for t in p if row[t] >= 0]
        assert sorted(chosen) == sorted(best + [-1] * (k - len(best)))


# prefetch


class Slots:
    """Slots, and a plain Python model of them: the token in each slot, for each row and head."""

    def __init__(self, k: int, dtype: torch.dtype = torch.float32, head_dim: int = HEAD_DIM) -> None:
        self.k = k
        self.pairs = random_pairs(CAPACITY, 1, head_dim, dtype)
        self.host = in_pages(self.pairs, TABLE).pages
        self.slots = torch.full((*ROWS, k, 2, head_dim), math.nan, dtype=dtype)
        self.slot_index = torch.full((*ROWS, k), -1, dtype=torch.int32)
        self.selected = torch.full((*ROWS, k), -1, dtype=torch.int32)
        self.fetched = torch.zeros(1, dtype=torch.int64)
        self.scores = torch.zeros(1)
        self.pair_bytes = 2 * head_dim * dtype.itemsize

    def held(self, b: int, h: int) -> dict[int, int]:
        """Return token → slot."""
        return {token: place for place, token in enumerate(self.slot_index[b, h].tolist()) if token >= 0}

    def refill(self) -> None:
        """Prefetch, which is done when the op returns."""
        run("prefetch", self.selected, cursor_over(TABLE, 20), self.host, self.slots, self.slot_index, self.fetched)

    def fetch(self, wishes: list[list[list[int]]]) -> None:
        """Refill with the selection, and check everything that a refill guarantees."""
        missing = 0
        before = [[self.held(b, h) for h in range(HEADS)] for b in range(BATCH)]
        for b in range(BATCH):
            for h in range(HEADS):
                wish = wishes[b][h]
                self.selected[b, h] = torch.tensor(wish + [-1] * (self.k - len(wish)))
                missing += len(set(wish) - set(before[b][h]))
        already = self.fetched.item()
        self.refill()
        assert self.fetched.item() - already == missing * self.pair_bytes
        for b in range(BATCH):
            for h in range(HEADS):
                wish, now = wishes[b][h], self.held(b, h)
                assert set(now) == set(wish)
                assert (self.slot_index[b, h] >= 0).sum() == len(wish), "an index stands in two slots"
                for token, place in now.items():
                    assert torch.equal(self.slots[b, h, place], self.pairs[b, h, token])
                    assert before[b][h].get(token, place) == place, "a pair that stays has moved"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("k", "head_dim"), [(1, 16), (8, 16), (70, 80)])
@pytest.mark.parametrize("candidates", [5, 40, CAPACITY])
def test_slots_hold_the_selected_pairs_and_only_missing_ones_travel(
    candidates: int, k: int, head_dim: int, dtype: torch.dtype
) -> None:
    wishes = random.Random(f"{candidates} {k}")
    slots = Slots(k, dtype, head_dim)
    for _ in range(6):
        drawn = [wishes.sample(range(candidates), wishes.randint(0, min(k, candidates))) for _ in range(BATCH * HEADS)]
        slots.fetch([drawn[row * HEADS : (row + 1) * HEADS] for row in range(BATCH)])


@on_cpus
def test_slots_for_more_pairs_than_there_are_need_memory_in_proportion_to_their_number() -> None:
    Slots(200_000).fetch([[list(range(CAPACITY))] * HEADS] * BATCH)  # 160 GB for each slot and each selected token
