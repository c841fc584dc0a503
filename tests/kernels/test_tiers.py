"""The ops that move pairs between tiers, against plain Python models of each tier."""

from __future__ import annotations

import itertools
import math
import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from held_tiers import adjacent, cursor_over, in_pages
from specache_compile.evaluation.baselines import pages  # noqa: F401 - declares its op
from specache_compile.kernels.codes.cpp_trellis import encoder
from specache_compile.kernels.codes.params import stored_scale
from specache_compile.kernels.codes.quantize import quantize_keys, quantize_values
from specache_compile.kernels.codes.records import by_token, in_thread_order, param_order, read_levels, stored_dim
from specache_compile.kernels.codes.trellis import quantize
from specache_compile.kernels.movement.copy_queue import CopyQueue
from specache_compile.kernels.movement.tier_ops import padded, refill
from specache_compile.kernels.op import op_of
from specache_compile.kernels.state.cursor import LENGTH, LOW_BIT, NEXT_LOW_BIT, QUEUE
from specache_compile.kernels.state.layout import Layout, rotated
from specache_compile.kernels.state.page_table import LOW_BIT_TIER, PAGE, Pages, rows_read

pytestmark = pytest.mark.pairwise

BATCH, HEADS, HEAD_DIM, CAPACITY = 2, 2, 16, 1024
ROWS, TABLE = (BATCH, HEADS), adjacent(BATCH, CAPACITY)
ops = torch.ops.specache


class Fused:
    """The ops, in C++ if an op has C++."""

    def __getattr__(self, name: str) -> Any:
        found = torch.ops.specache
        return getattr(found, f"{name}_fused" if op_of(getattr(found, name).default).fused else name)


@pytest.fixture(autouse=True, params=[ops, Fused()], ids=["definitions", "C++"])
def every_implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with every implementation of the ops."""
    monkeypatch.setattr(sys.modules[__name__], "ops", request.param)


def random_pairs(tokens: int, seed: int, head_dim: int = HEAD_DIM, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*ROWS, tokens, 2, head_dim, generator=generator).to(dtype)


# append and offload


@dataclass
class Cache:
    """The tiers of a cache, and all pairs that were appended, in order."""

    bits: int
    group: int
    residual: int
    head_dim: int = HEAD_DIM
    dtype: torch.dtype = torch.float32
    zero_point: str = "midpoint"
    value_bits: int | None = None
    rotate: bool = False
    sink_tokens: int = 0
    trellis: bool = False
    key_trellis: bool = False
    eight: bool = False
    center: Tensor = field(default_factory=lambda: torch.zeros(*ROWS, 0, 1))
    originals: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        d, quantized = self.head_dim, self.bits < 16
        self.dim = stored_dim(d)
        self.size = min(self.dim, self.group)
        self.window = self.residual + self.group
        self.cursor = cursor_over(TABLE)
        self.recent = torch.full((*ROWS, self.window, 2, d), math.nan, dtype=self.dtype)
        self.host = torch.full((*ROWS, CAPACITY, 2, d), math.nan, dtype=self.dtype)
        self.layout = Layout(self.bits, self.value_bits or self.bits, self.rotate)
        self.codes = torch.full((*ROWS, CAPACITY, 2 * d), math.nan, dtype=self.dtype)
        if quantized:
            self.codes = torch.full((*ROWS, CAPACITY, self.layout.width(d)), 255, dtype=torch.uint8)
        groups, tokens = (CAPACITY // self.group, CAPACITY) if quantized else (0, 0)
        dtype, nothing = (torch.uint8, 255) if self.eight else (self.dtype, math.nan)
        self.key_params = torch.full((*ROWS, groups, 2, self.dim), nothing, dtype=dtype)
        if self.key_trellis:
            self.key_params = torch.full((*ROWS, groups, 1, self.group), nothing, dtype=dtype)
            self.center = torch.zeros(*ROWS, 3, d)
        of_values = (1, 1) if self.trellis else (2, self.dim // self.size)
        self.value_params = torch.full((*ROWS, tokens, *of_values), nothing, dtype=dtype)
        self.sink_pairs = torch.full((*ROWS, self.sink_tokens, 2, d), math.nan, dtype=self.dtype)
        self.pages = {name: in_pages(getattr(self, name), CAPACITY).pages for name in (*LOW_BIT_TIER, "host")}
        # Row b's sinks begin at its token 2·b.
        first = 2 * torch.arange(BATCH).view(-1, 1, 1)
        self.sink_index = (torch.arange(self.sink_tokens) + first).int()

    @property
    def length(self) -> int:
        return sum(pairs.shape[2] for pairs in self.originals)

    def low_bit(self, length: int) -> int:
        return self.group * max(0, (length - self.residual) // self.group)

    def put(self, tokens: int) -> None:
        """Append and offload random pairs, with a session's cursor."""
        pairs = random_pairs(tokens, self.length, self.head_dim, self.dtype)
        if self.rotate:  # of eighths, a rotation's sums are the same in any order, which is a processor's to choose
            pairs = (pairs * 8).round() / 8
        self.cursor[:, LENGTH] = self.length
        self.cursor[:, LOW_BIT] = self.low_bit(self.length)
        self.cursor[:, NEXT_LOW_BIT] = self.low_bit(self.length + tokens)
        k, v = pairs.unbind(3)
        low_bit_tier = (self.pages[name] for name in LOW_BIT_TIER)
        ops.append(
            k, v, None, self.cursor, *low_bit_tier, self.center, self.sink_pairs, self.sink_index, self.recent,
            *self.layout, self.zero_point,
        )  # fmt: skip
        ops.offload(k, v, None, self.cursor, self.pages["host"])
        for name, tier in self.pages.items():
            setattr(self, name, rows_read(tier, TABLE))
        self.originals.append(pairs)

    def check(self) -> None:
        n, low_bit = self.length, self.low_bit(self.length)
        truth = torch.cat(self.originals, 2)
        assert torch.equal(self.host[:, :, :n], truth)
        assert self.host[:, :, n:].isnan().all()
        newest = torch.arange(low_bit, n)
        assert torch.equal(self.recent[:, :, newest % self.window], truth[:, :, newest])
        if self.bits == 16:
            assert torch.equal(self.codes[:, :, :low_bit].unflatten(3, (2, -1)), truth[:, :, :low_bit])
            assert self.codes[:, :, low_bit:].isnan().all()
            return
        if self.key_trellis:
            truth = truth.clone()
            truth[:, :, :, 0] -= self.mean_of_the_first(truth)
        keys, values = (rotated(truth).to(self.dtype) if self.rotate else truth)[:, :, :low_bit].unbind(3)
        others = torch.ones(*ROWS, low_bit, dtype=torch.bool)
        for row, tokens in enumerate(self.sink_index[:, 0].tolist()):
            for place, token in enumerate(tokens):
                if token < low_bit:
                    assert torch.equal(self.sink_pairs[row, :, place], self.host[row, :, token])
                    others[row, :, token] = False
                    if not self.key_trellis:  # a key that is there twice changes no range
                        keys[row, :, token] = keys[row, :, token // self.group * self.group + self.group - 1]
                else:
                    assert self.sink_pairs[row, :, place].isnan().all()
        dtype, key_bits, value_bits = self.key_params.dtype, self.layout.key_bits, self.layout.value_bits
        if self.key_trellis:
            key_levels, scales = self.in_trellis(keys, values=False)
            key_params = stored_scale(scales, dtype).view(*ROWS, -1, 1, self.group)
        else:
            key_levels, key_params = quantize_keys(padded(keys), self.group, key_bits, self.zero_point, dtype)
            key_params = key_params[..., param_order(self.dim, key_bits)]
        if self.trellis:
            value_levels, scales = self.in_trellis(values, values=True)
            value_params = stored_scale(in_thread_order(scales), dtype)[..., None, None]
        else:
            value_levels, value_params = quantize_values(padded(values), self.size, value_bits, self.zero_point, dtype)
        for levels, bits, of_values in ((key_levels, key_bits, False), (value_levels, value_bits, True)):
            found = read_levels(self.codes, self.dim, bits, of_values)
            assert torch.equal(found[:, :, :low_bit][others], levels[others])
            assert (found[:, :, low_bit:] == 2**bits - 1).all()
        groups = low_bit // self.group
        assert torch.equal(self.key_params[:, :, :groups], key_params)
        assert torch.equal(self.value_params[:, :, :low_bit], value_params)
        for untouched in (self.key_params[:, :, groups:], self.value_params[:, :, low_bit:]):
            assert (untouched == 255).all() if self.eight else untouched.isnan().all()

    def in_trellis(self, x: Tensor, values: bool) -> tuple[Tensor, Tensor]:
        """Return the bits [B, H, n, D] of keys or values [B, H, n, d], and their scales [B, H, n]."""
        bits, scale = quantize(x, 0, self.dim, values, encoder(x.device))
        return by_token(bits, self.dim, 1, values)[:, :, : x.shape[2]], scale[..., 0, 0]

    def mean_of_the_first(self, truth: Tensor) -> Tensor:
        """Return the mean [B, H, 1, d] of the first keys of the low-bit tier, from one append."""
        lengths = itertools.accumulate(pairs.shape[2] for pairs in self.originals)
        first = next(filter(None, map(self.low_bit, lengths)), 0)
        return truth[:, :, :first, 0].double().mean(2, keepdim=True).float() if first else torch.zeros(*ROWS, 1, 1)


@pytest.mark.parametrize("residual", [0, 20, 32, 100])
@pytest.mark.parametrize(("bits", "group"), [(1, 32), (2, 64), (4, 32), (8, 128), (16, 32)])
def test_after_any_appends_each_tier_holds_what_it_should(bits: int, group: int, residual: int) -> None:
    sizes = random.Random(f"{bits} {residual}")
    cache = Cache(bits, group, residual)
    for _ in range(15):
        tokens = sizes.choice([1, 1, 2, sizes.randint(3, 40), sizes.randint(41, 150)])
        if cache.length + tokens <= CAPACITY:
            cache.put(tokens)
            cache.check()


TURNED: dict[str, Any] = {"rotate": True, "value_bits": 1}
CACHES: tuple[dict[str, Any], ...] = (
    *({"rotate": True, "bits": bits, "value_bits": value_bits} for bits, value_bits in ((2, 1), (1, 4), (2, 2))),
    *({**TURNED, "bits": bits, "sink_tokens": sinks} for bits in (1, 2) for sinks in (1, 4, 20)),
    *(
        {**TURNED, "sink_tokens": 4, "trellis": True, "head_dim": head_dim, "eight": eight, **keys}
        for head_dim in (64, 80) for eight in (False, True) for keys in ({"bits": 2}, {"bits": 1, "key_trellis": True})
    ),
    *(
        {"bits": 1, "group": 64, "residual": 64, "head_dim": head_dim, "dtype": dtype, "zero_point": zero_point}
        for zero_point, head_dim, dtype in (
            ("midpoint", 80, torch.bfloat16), ("midpoint", 128, torch.float16), ("minimum", 80, torch.float16),
            ("minimum", 128, torch.bfloat16), ("middles", 80, torch.bfloat16), ("middles", 128, torch.float16),
        )
    ),
)  # fmt: skip


@pytest.mark.parametrize("options", CACHES, ids=str)
def test_each_tier_holds_what_it_should_with_every_option(options: dict[str, Any]) -> None:
    """Sinks are kept as they are and widen no group; a trellis of keys subtracts the mean of the first ones."""
    cache = Cache(**{"group": 32, "residual": 32, **options})
    for tokens in (3, 1, 59, 1, 1, 40, 64):
        cache.put(tokens)
        cache.check()


@pytest.mark.parametrize("first", [1, 100])
def test_token_by_token_over_several_groups(first: int) -> None:
    cache = Cache(bits=2, group=32, residual=32)
    cache.put(first)
    for _ in range(70):
        cache.put(1)
        cache.check()


# select_topk


@pytest.mark.parametrize("k", [0, 1, 16, 64, 100])
@pytest.mark.parametrize("candidates", [0, 1, 30, 64])
def test_the_candidates_of_largest_score_are_selected(candidates: int, k: int) -> None:
    torch.manual_seed(candidates)
    scores = torch.full((*ROWS, 64), -1.0)
    for row in scores.flatten(0, 1):
        row[torch.randperm(64)[:candidates]] = torch.rand(candidates)
    selected = torch.full((*ROWS, k), 7, dtype=torch.int32)
    ops.select_topk(scores, selected)
    for row, chosen in zip(scores.flatten(0, 1).tolist(), selected.flatten(0, 1).tolist(), strict=True):
        best = sorted((t for t in range(64) if row[t] >= 0), key=lambda t: -row[t])[:k]
        assert sorted(chosen) == sorted(best + [-1] * (k - len(best)))


@pytest.mark.parametrize(("k", "page"), [(16, 4), (18, 4), (64, 7), (5, 5), (4, 1)])
def test_pages_go_by_their_best_token(k: int, page: int) -> None:
    torch.manual_seed(k)
    scores = torch.rand(*ROWS, 60).masked_fill(torch.rand(*ROWS, 60) < 0.4, -1.0)
    scores[..., 50:] = -1.0
    selected = torch.full((*ROWS, k), 7, dtype=torch.int32)
    ops.select_pages(scores, selected, page)
    for row, chosen in zip(scores.flatten(0, 1).tolist(), selected.flatten(0, 1).tolist(), strict=True):
        runs = [range(60)[start : start + page] for start in range(0, 60, page)]
        by_best = sorted(runs, key=lambda run: -max(row[t] for t in run))
        best = [t for p in by_best[: k // page] for t in p if row[t] >= 0]
        assert sorted(chosen) == sorted(best + [-1] * (k - len(best)))


def test_a_score_of_zero_is_a_candidate() -> None:
    scores = torch.tensor([[[0.0, -1.0, 0.0]]])
    selected = torch.zeros(1, 1, 3, dtype=torch.int32)
    ops.select_topk(scores, selected)
    assert sorted(selected.flatten().tolist()) == [-1, 0, 2]


# prefetch


class Slots:
    """Slots, and a plain Python model of them: the token in each slot, for each row and head."""

    def __init__(self, k: int, dtype: torch.dtype = torch.float32) -> None:
        self.k = k
        self.pairs = random_pairs(CAPACITY, 1, dtype=dtype)
        self.host = in_pages(self.pairs).pages
        self.slots = torch.full((*ROWS, k, 2, HEAD_DIM), math.nan, dtype=dtype)
        self.slot_index = torch.full((*ROWS, k), -1, dtype=torch.int32)
        self.selected = torch.full((*ROWS, k), -1, dtype=torch.int32)
        self.fetched = torch.zeros(1, dtype=torch.int64)
        self.scores = torch.zeros(1)
        self.pair_bytes = 2 * HEAD_DIM * dtype.itemsize

    def held(self, b: int, h: int) -> dict[int, int]:
        """Return token → slot."""
        return {token: place for place, token in enumerate(self.slot_index[b, h].tolist()) if token >= 0}

    def refill(self) -> None:
        refill(self.selected, Pages(self.host, TABLE), self.slots, self.slot_index, self.fetched)

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
@pytest.mark.parametrize("k", [1, 8, 32])
@pytest.mark.parametrize("candidates", [5, 40, CAPACITY])
def test_slots_hold_the_selected_pairs_and_only_missing_ones_travel(
    candidates: int, k: int, dtype: torch.dtype
) -> None:
    wishes = random.Random(f"{candidates} {k}")
    slots = Slots(k, dtype)
    for _ in range(8):
        slots.fetch(
            [
                [wishes.sample(range(candidates), wishes.randint(0, min(k, candidates))) for _ in range(HEADS)]
                for _ in range(BATCH)
            ]
        )


def test_the_same_selection_again_copies_nothing_in_any_order() -> None:
    slots = Slots(8)
    slots.fetch([[[4, 9, 1, 7]] * HEADS] * BATCH)
    slots.host.fill_(math.nan)
    slots.selected[..., :4] = torch.tensor([7, 1, 9, 4])
    before = slots.fetched.item()
    slots.refill()
    assert slots.fetched.item() == before
    assert slots.slots[slots.slot_index >= 0].isfinite().all()


def test_heads_fetch_apart() -> None:
    """One head selects nothing and another all slots: each head is independent."""
    slots = Slots(6)
    slots.fetch([[[], [1, 2, 3, 4, 5, 6]], [[3], [9, 8]]])
    slots.fetch([[[1, 2, 3, 4, 5, 6], []], [[3, 9], [8]]])


def test_prefetch_and_offload_without_a_queue_are_done_when_they_return() -> None:
    slots = Slots(4)
    slots.selected[...] = torch.tensor([3, 1, -1, 8])
    ops.prefetch(slots.selected, cursor_over(TABLE, 20), slots.host, slots.slots, slots.slot_index, slots.fetched)
    assert set(slots.held(1, 1)) == {1, 3, 8}


# On the copy queue


class Gate:
    """Blocks the worker thread until the gate opens."""

    def __init__(self, queue: CopyQueue) -> None:
        self.opened = threading.Event()
        queue.submit_offload(self.job)

    def job(self) -> int:
        assert self.opened.wait(10)
        return 0


@pytest.fixture
def queue() -> Iterator[CopyQueue]:
    queue = CopyQueue()
    yield queue
    queue.settle()


@pytest.mark.parametrize("every_implementation", [torch.ops.specache], ids=["definitions"], indirect=True)
def test_a_wait_stands_between_a_prefetch_and_its_slots(queue: CopyQueue) -> None:
    cursor = cursor_over(TABLE, 20, queue=queue.number)
    slots = Slots(4)
    slots.selected[...] = torch.tensor([3, 1, -1, 8])
    gate = Gate(queue)
    ops.prefetch(slots.selected, cursor, slots.host, slots.slots, slots.slot_index, slots.fetched)
    assert (slots.slot_index == -1).all(), "the op must not wait for the copy"
    gate.opened.set()
    ops.wait(slots.scores, cursor, slots.slots, slots.slot_index, slots.selected)
    assert set(slots.held(0, 0)) == {1, 3, 8}
    assert slots.fetched.item() == BATCH * HEADS * 3 * slots.pair_bytes


@pytest.mark.parametrize("every_implementation", [torch.ops.specache], ids=["definitions"], indirect=True)
def test_offloaded_pairs_are_there_for_a_later_prefetch(queue: CopyQueue) -> None:
    cursor = cursor_over(TABLE, 8, queue=queue.number)
    slots = Slots(4)
    new = random_pairs(1, 5)
    slots.selected[...] = torch.tensor([8, 0, -1, -1])
    gate = Gate(queue)
    ops.offload(*new.unbind(3), None, cursor, slots.host)
    ops.prefetch(slots.selected, cursor, slots.host, slots.slots, slots.slot_index, slots.fetched)
    gate.opened.set()
    ops.wait(slots.scores, cursor, slots.slots, slots.slot_index, slots.selected)
    assert torch.equal(slots.slots[0, 1, slots.held(0, 1)[8]], new[0, 1, 0])


def test_a_fetch_in_cpp_waits_for_the_prompts_offload(queue: CopyQueue) -> None:
    """The fetch is synchronous, but waits until the worker has stored its pairs."""
    cursor = cursor_over(TABLE, queue=queue.number)
    slots = Slots(4)
    new = random_pairs(40, 5)
    slots.selected[...] = torch.tensor([30, 0, -1, -1])
    gate = Gate(queue)
    ops.offload(*new.unbind(3), None, cursor, slots.host)
    threading.Timer(0.05, gate.opened.set).start()
    ops.prefetch(slots.selected, cursor, slots.host, slots.slots, slots.slot_index, slots.fetched)
    ops.wait(slots.scores, cursor, slots.slots, slots.slot_index, slots.selected)
    assert torch.equal(slots.slots[0, 1, slots.held(0, 1)[30]], new[0, 1, 30])


def test_an_offload_owns_its_memory_and_its_place(queue: CopyQueue) -> None:
    """Inductor reuses k and v, and the next step moves the cursor, before the copy runs."""
    cursor = cursor_over(adjacent(BATCH, PAGE), 8, queue=queue.number)
    host = torch.zeros(*ROWS, PAGE, 2, HEAD_DIM)
    new = random_pairs(2, 5)
    k, v = (x.clone() for x in new.unbind(3))
    gate = Gate(queue)
    ops.offload(k, v, None, cursor, host)
    k.fill_(math.nan)
    v.fill_(math.nan)
    cursor[:, LENGTH] = 0
    gate.opened.set()
    queue.wait_for_offloads()
    assert torch.equal(host[:, :, 8:10], new)
    assert (host[:, :, :8] == 0).all()
    assert (host[:, :, 10:] == 0).all()


def test_an_extend_reads_the_host_tier_only_after_the_offloads(queue: CopyQueue) -> None:
    host = torch.full((*ROWS, PAGE, 2, HEAD_DIM), math.nan)
    host[:, :, :8] = random_pairs(8, 3)
    new, q = random_pairs(1, 5), random_pairs(1, 6)[:, :, :, 0]
    cursor = cursor_over(adjacent(BATCH, PAGE), 8, queue=queue.number)
    threading.Timer(0.05, Gate(queue).opened.set).start()
    ops.offload(*new.unbind(3), None, cursor, host)
    cursor[:, LENGTH] = 9
    out = ops.extend_attention(q, q, q, None, None, cursor, host, 0.25, None)
    cursor[:, QUEUE] = 0
    assert torch.equal(out, ops.extend_attention(q, q, q, None, None, cursor, host, 0.25, None))
    assert out.isfinite().all()
