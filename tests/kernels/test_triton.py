"""Each Triton kernel against its op's PyTorch definition: on a GPU if there is one, else interpreted.

The interpreter multiplies bfloat16 as integers and truncates conversions to it, so bfloat16 runs only on a GPU.
`compile_kernels.py` compiles every kernel for sm_80 and sm_90, in float32, float16 and bfloat16.
"""

from __future__ import annotations

import functools
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")


from kept_fixture import Named, bases_of, logits_by_token, spoil

import pairwise
from held_tiers import adjacent, cursor_over, empty_state, in_pages
from specache_compile.errors import SpecacheError
from specache_compile.kernels.attention import attention_ops as attention
from specache_compile.kernels.attention import extend, triton_extend
from specache_compile.kernels.decode import triton_decode, triton_exact, triton_scored
from specache_compile.kernels.movement import copy_stream, triton_append, triton_copy
from specache_compile.kernels.movement import tier_ops as tiers
from specache_compile.kernels.movement import triton_select as select
from specache_compile.kernels.state import center, layout, triton_center, triton_rotate
from specache_compile.kernels.state.by_rows import rows_of
from specache_compile.kernels.state.by_token import tokens_of
from specache_compile.kernels.state.cursor import LENGTH, LOW_BIT, NEXT_LOW_BIT
from specache_compile.kernels.state.page_table import shape_of_scores
from specache_compile.kernels.state.sinks import find_sinks
from specache_compile.kernels.state.stored_tiers import StoredTiers
from specache_compile.methods.field import LayerShape
from specache_compile.methods.specache import SpecacheOptions

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# A GPU's exponential is not exact to the last bit, and its sums have another order.
TOLERANCE = {torch.float32: 1e-5 if DEVICE.type == "cuda" else 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
BATCH = 2
KEYS, VALUES = 0, 1


@dataclass(frozen=True)
class Case(Named):
    """One layer's shape, options and number of tokens, and its site's mask, softcap and sinks."""

    bits: int = 2
    value_bits: int | None = None
    rotate: bool = False
    group: int = 32
    head_dim: int = 64
    heads: int = 2
    queries: int = 2
    lanes: int = 2
    length: int = 150
    top_k: int = 8
    dtype: torch.dtype = torch.float32
    mask: str = ""
    softcap: float | None = None
    sinks: bool = False
    zero_point: str = "midpoint"
    center: bool = False
    sink_tokens: int = 0
    key_code: str = "levels"
    value_code: str = "levels"
    param_bits: int = 16

    @property
    def options(self) -> SpecacheOptions:
        return SpecacheOptions(
            bits=self.bits, value_bits=self.value_bits, rotate=self.rotate, group_size=self.group, residual_length=32,
            top_k=self.top_k, correct="never", zero_point=self.zero_point, center="always" if self.center else "never",
            sink_tokens=self.sink_tokens, key_code=self.key_code, value_code=self.value_code,
            param_bits=self.param_bits,
        )  # fmt: skip

    @property
    def frequencies(self) -> Tensor | None:
        """Return RoPE's frequencies of half the channels, or None."""
        known = self.center or (self.key_code == "trellis" and self.head_dim > 64)
        return 0.8 ** torch.arange(self.head_dim // 4, device=DEVICE) if known else None

    @property
    def has_exact_rotation(self) -> bool:
        """Return whether sums are exact in any order: small multiples of eighths, and a block that is a power of four,
        whose square root is exact."""
        return layout.rotation_block(self.head_dim) in (16, 64, 256)


IN_TRELLIS = functools.partial(Case, bits=1, key_code="trellis", value_code="trellis", param_bits=8)
AXES: dict[str, list[Any]] = {
    "bits": [1, 2, 4, 8, 16], "value_bits": [None, 1, 2, 8], "rotate": [False, True], "group": [32, 64, 128],
    # 8: fewer channels than a product's smallest side; 72: an odd number of bytes a plane; 80, 96: planes straddle.
    "head_dim": [8, 16, 64, 72, 80, 96, 128, 256], "heads": [1, 3], "queries": [1, 2, 12], "lanes": [1, 2, 11],
    # In the step after 66 tokens the sinks' group leaves the window.
    "length": [20, 65, 66, 150, 300], "top_k": [0, 8, 400], "dtype": [torch.float32, torch.float16],
    "mask": ["", "bool", "padding", "additive"], "softcap": [None, 5.0], "sinks": [False, True],
    "zero_point": ["midpoint", "minimum", "middles"], "center": [False, True], "sink_tokens": [0, 1, 4, 40],
    "key_code": ["levels", "trellis"], "value_code": ["levels", "trellis"], "param_bits": [8, 16],
}  # fmt: skip


def is_possible(case: Case) -> bool:
    """Return whether the options exist, and the interpreter takes seconds."""
    rows = case.heads * case.queries * case.lanes
    if rows > 24 or rows * case.head_dim > 1024 or (case.bits == 16 and case.value_bits is not None):
        return False
    if case.center and case.head_dim == 256:  # sums over so many biased channels have a larger rounding error
        return False
    try:
        return bool(case.options)
    except SpecacheError:
        return False


def random_cases(count: int) -> Iterator[Case]:
    chance = random.Random(0)
    for _ in range(count):
        case = Case(**{name: chance.choice(values) for name, values in AXES.items()})
        if is_possible(case):
            yield case


SAMPLE = list(random_cases(6_000))
CASES = [Case(), *(SAMPLE[place] for place in pairwise.chosen([{"case": case} for case in SAMPLE]))]
if DEVICE.type == "cuda":
    CASES += [
        *(Case(dtype=torch.bfloat16, bits=bits) for bits in (2, 4, 8)),
        Case(dtype=torch.bfloat16, bits=1, head_dim=128),
        Case(dtype=torch.bfloat16, value_bits=1, value_code="trellis", param_bits=8, rotate=True, head_dim=128),
        Case(dtype=torch.bfloat16, param_bits=8, bits=1, value_code="trellis", group=64, lanes=1),
        *(IN_TRELLIS(dtype=torch.bfloat16, rotate=True, head_dim=d, sink_tokens=4) for d in (64, 128, 256)),
    ]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


class Layer:
    """A layer's state after a prefill and five steps, by the reference or by Triton."""

    def __init__(self, case: Case, append: Any) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(0)
        shape = LayerShape(case.heads, case.head_dim, case.dtype, DEVICE)
        capacity = 256 if case.length < 250 else 512
        self.state = empty_state(case.options, shape, BATCH, capacity)
        self.cursor = cursor_over(adjacent(BATCH, capacity)).to(DEVICE)
        self.pairs = torch.randn(BATCH, case.heads, case.length, 2, case.head_dim, generator=generator)
        if case.options.layout.is_rotated and case.has_exact_rotation:
            self.pairs = (self.pairs * 8).round() / 8
        if case.center:  # a bias far above float32's rounding of it
            self.pairs[:, :, :, 0] += 5 * torch.randn(case.head_dim, generator=generator)
        self.pairs = self.pairs.to(DEVICE, case.dtype)
        at = 0
        for tokens in (case.length - 6, 1, 1, 1, 1, 2):
            self.point(at, tokens)
            k, v = self.pairs[:, :, at : at + tokens].unbind(3)
            padding, sink_index = padding_of(case, len(self)), self.state["sink_index"]
            if sink_index.shape[2]:
                there = None if padding is None else padding[:, 0, 0]
                find_sinks(sink_index, there, case.options.low_bit_length(at), at + tokens)
            tier = (self.state[name] for name in StoredTiers._fields)
            settings = (*case.options.layout, case.zero_point, case.frequencies)
            append(k, v, padding, self.cursor, *tier, *settings)
            at += tokens
        self.point(at, 1)

    def __len__(self) -> int:
        return shape_of_scores(self.state["codes"], self.cursor)[2]

    def point(self, length: int, tokens: int) -> None:
        self.cursor[:, LENGTH] = length
        self.cursor[:, LOW_BIT] = self.case.options.low_bit_length(length)
        self.cursor[:, NEXT_LOW_BIT] = self.case.options.low_bit_length(length + tokens)

    def fill_slots(self) -> None:
        """Fill the slots with random tokens of the low-bit tier, and with NaN if there are fewer than k."""
        low_bit, slots, index = int(self.cursor[0, LOW_BIT]), self.state["slots"], self.state["slot_index"]
        slots.fill_(float("nan"))
        for row in range(BATCH):
            for head in range(self.case.heads):
                tokens = torch.randperm(low_bit).to(DEVICE)
                tokens = tokens[~torch.isin(tokens, self.state["sink_index"][row])][: self.case.top_k]
                index[row, head, : len(tokens)] = tokens.int()
                slots[row, head, : len(tokens)] = self.pairs[row, head, tokens]


def padding_of(case: Case, capacity: int) -> Tensor | None:
    """Return padding [B, 1, 1, C] for a bool mask: the first tokens and every fifth, except in the first row."""
    if case.mask != "bool":
        return None
    tokens = torch.arange(capacity, device=DEVICE)
    there = (tokens >= 40 * torch.arange(BATCH, device=DEVICE).view(-1, 1, 1, 1)) & (tokens % 5 > 0)
    there[0] = True
    return there


def test_a_long_prompt_is_rotated_in_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_append, "SCRATCH", 2 * BATCH * 2 * 32 * 2 * 64 * 4)
    assert triton_append.groups_of_a_launch(BATCH * 2 * 32 * 2 * 64 * 4, 9) == 2
    case = Case(rotate=True)
    ours, reference = Layer(case, triton_append.append), Layer(case, tiers.append)
    for field in ("recent", "codes", "key_params", "value_params"):
        assert torch.equal(ours.state[field], reference.state[field]), field


def test_keys_of_a_long_prompt_go_into_a_trellis_in_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(rotate=True, bits=1, key_code="trellis", head_dim=16, heads=1)
    whole = Layer(case, triton_append.append)
    monkeypatch.setattr(triton_append, "SCRATCH", 2 * BATCH * 32 * 2 * 16 * 4)
    parts = Layer(case, triton_append.append)
    for field in ("recent", "codes", "key_params", "value_params"):
        assert torch.equal(parts.state[field], whole.state[field]), field


@pytest.mark.parametrize("d", [2, 16, 65, 72, 80, 96, 128, 256])
def test_rows_are_rotated(d: int) -> None:
    x = torch.randn(3, BATCH, 5, d, generator=torch.Generator().manual_seed(2)).to(DEVICE).movedim(0, 2)
    turned = triton_rotate.rotated(x)
    assert turned.is_contiguous()
    torch.testing.assert_close(turned, layout.rotated(x), atol=1e-6, rtol=1e-6)


def mask_of(case: Case) -> Tensor | None:
    tokens = case.length + 1
    if case.mask == "bool":
        seen = torch.rand(BATCH, 1, case.lanes, tokens) > 0.3
        seen[..., -1] = True
        return seen.to(DEVICE)
    if case.mask == "padding":
        return (torch.arange(tokens) >= torch.tensor([0, 70]).view(-1, 1, 1, 1)).to(DEVICE)
    if case.mask == "additive":
        bias = torch.randn(BATCH, case.heads * case.queries, 1, tokens).to(case.dtype)
        bias[0, :, :, :20] = torch.finfo(case.dtype).min
        return bias.to(DEVICE)
    return None


@dataclass(frozen=True)
class Step:
    """One decode step's inputs for a case, shared by all three attentions."""

    layer: Layer
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    sinks: Tensor | None

    def state(self, *fields: str) -> list[Tensor]:
        return [self.layer.state[field] for field in fields]

    @property
    def read(self) -> tuple[Any, ...]:
        """Return the last arguments of an attention: tiers, layout, scale, softcap."""
        case = self.layer.case
        return self.state(*StoredTiers._fields), case.options.layout, case.head_dim**-0.5, case.softcap

    def whole(self, attend: Any) -> tuple[Tensor, Tensor]:
        slots = self.state("slots", "slot_index")
        return attend(self.q, self.k, self.v, self.mask, self.sinks, self.layer.cursor, *slots, *self.read)

    def scored(self, score: Any) -> tuple[Tensor, Tensor, Tensor]:
        return score(self.q, self.k, self.v, self.mask, self.sinks, self.layer.cursor, *self.read)

    def attended(self, attend: Any, *kept: Tensor, chosen: Tensor | None = None) -> Tensor:
        step = (self.q, self.k, self.v, self.mask, self.sinks, self.layer.cursor)
        slots, slot_index = self.state("slots", "slot_index")
        chosen = slot_index.flip(-1) if chosen is None else chosen
        return attend(*step, *kept, chosen, slots, slot_index, *self.read)


def step_of(case: Case) -> Step:
    layer = Layer(case, tiers.append)
    layer.fill_slots()
    query_heads = case.heads * case.queries
    # As after vmap: the lanes are folded in from an outer axis.
    q = torch.randn(case.lanes, BATCH, query_heads, case.head_dim).to(DEVICE, case.dtype).movedim(0, 2)
    k, v = torch.randn(2, case.lanes, BATCH, case.heads, case.head_dim).to(DEVICE, case.dtype).movedim(1, 3)
    sinks = torch.randn(query_heads).to(DEVICE, case.dtype) if case.sinks else None
    return Step(layer, q, k, v, mask_of(case), sinks)


@pytest.mark.pairwise(1)
@every_case
def test_decode_attention_and_the_halves_of_a_corrected_one(case: Case) -> None:
    """The whole op, and its two halves, give the same output."""
    step, tolerance = step_of(case), TOLERANCE[case.dtype]
    close = functools.partial(torch.testing.assert_close, atol=tolerance, rtol=tolerance)
    whole, scores = step.whole(triton_scored.decode_attention)
    expected, expected_scores = step.whole(attention.decode_attention)
    close(whole, expected)
    close(scores, expected_scores)
    assert whole.is_contiguous()

    logits, base, scores = step.scored(triton_scored.score_low_bit)
    *expected_kept, expected_scores = step.scored(attention.score_low_bit)
    assert logits.dtype == (torch.float32 if case.dtype == torch.float32 else torch.float16)
    low_bit = int(step.layer.cursor[0, LOW_BIT])
    known = logits_by_token(logits, base, case.queries * case.lanes).float().view_as(expected_kept[0])
    known, expected = known[..., :low_bit], expected_kept[0][..., :low_bit]
    hidden = expected < attention.SEEN  # in log2 units, the smallest number of a dtype is -inf
    assert (known[hidden] < attention.SEEN).all()
    torch.testing.assert_close(known[~hidden], expected[~hidden], atol=4 * tolerance, rtol=4 * tolerance)
    close(scores, expected_scores)
    assert scores[0].is_contiguous()  # `select_topk` requires this

    spoil(logits, base, low_bit)  # no op reads them
    out = step.attended(triton_scored.attend_scored, logits, base)
    close(out, step.attended(attention.attend_scored, *expected_kept))
    torch.testing.assert_close(out, whole, atol=2 * tolerance, rtol=2 * tolerance)
    assert out.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_fetched_tokens_have_no_low_bit_weight_for_any_logit(dtype: torch.dtype) -> None:
    """The first base of row 0 is 60 above all logits, as for a tile whose fetched token has most of the weight."""
    step = step_of(Case(dtype=dtype, value_bits=1, value_code="trellis", param_bits=8, rotate=True, head_dim=128))
    logits, base, _ = step.scored(triton_scored.score_low_bit)
    _, slot_index = step.state("slots", "slot_index")
    expected = step.attended(triton_scored.attend_scored, logits, base, chosen=slot_index)
    bases_of(logits, base)[0, :, 0, :, :2] += 60
    logits[0, :, 0, :, :4] -= 60
    found = step.attended(triton_scored.attend_scored, logits, base, chosen=slot_index)
    # Half precision stores a logit 60 below its base with an error of a sixteenth.
    torch.testing.assert_close(found, expected, atol=1e-2 if dtype == torch.float16 else 1e-5, rtol=0)


def test_pairs_that_come_late_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The low-bit values use the chosen tokens; slots and their index are undefined until the copies end."""
    step = step_of(Case(rotate=True, bits=1, dtype=torch.float16))
    slots, slot_index = step.state("slots", "slot_index")
    logits, base, _ = step.scored(triton_scored.score_low_bit)
    expected = step.attended(triton_scored.attend_scored, logits, base)

    chosen, right = slot_index.flip(-1).clone(), (slots.clone(), slot_index.clone())
    slots.fill_(float("nan"))
    slot_index.copy_(slot_index.roll(1, -1) + 1)

    def arrive(slots: Tensor) -> None:
        for tensor, pairs in zip(step.state("slots", "slot_index"), right, strict=True):
            tensor.copy_(pairs)

    monkeypatch.setattr(triton_scored, "wait_for_correction", arrive)
    found = step.attended(triton_scored.attend_scored, logits, base, chosen=chosen)
    assert torch.equal(found, expected)
    assert found.isfinite().all()


def test_a_center_of_thousands_leaves_tokens_their_order() -> None:
    """If all low-bit tokens' logits share an offset of 3,000, scores still rank by their differences."""
    step = step_of(Case(center=True, dtype=torch.float16))
    step.layer.state["center"][:, :, 0, -1] += 6000.0  # a channel that RoPE does not rotate
    step.q[..., -1] = 4.0
    (_, scores), (_, expected) = (step.whole(at.decode_attention) for at in (triton_scored, attention))
    assert expected.max() < 0.9
    torch.testing.assert_close(scores, expected, atol=1e-2, rtol=1e-2)
    *kept, scores = step.scored(triton_scored.score_low_bit)
    *expected_kept, expected = step.scored(attention.score_low_bit)
    assert expected_kept[0][0, 0, 0, 0] > 2000
    torch.testing.assert_close(scores, expected, atol=1e-2, rtol=1e-2)
    out = step.attended(triton_scored.attend_scored, *kept)
    expected = step.attended(attention.attend_scored, *expected_kept)
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("queries", "lanes", "d"), [(4, 2, 64), (3, 1, 80), (1, 1, 32)], ids=str)
def test_a_share_of_the_center_is_that_of_double_precision(
    dtype: torch.dtype, queries: int, lanes: int, d: int
) -> None:
    """Within a few units of float32's last place, for several groups at once, and none after the low-bit tier."""
    heads, group, capacity, low_bit = 2, 32, 2048, 1504
    q = (20 * torch.randn(BATCH, lanes, heads * queries, d)).to(DEVICE, dtype).transpose(1, 2)
    theta, partner = center.partners(0.8 ** torch.arange(d // 2 - 4, device=DEVICE), d)
    beta = 100 * torch.randn(BATCH, heads, d, device=DEVICE)
    rows = [beta, center.quarter_turn(beta, partner), theta.expand_as(beta), partner.expand_as(beta)]
    cursor = torch.tensor([[low_bit + 40, low_bit, low_bit, 0]], device=DEVICE).repeat(BATCH, 1)
    shares = triton_center.share_of_center(q, torch.stack(rows, 2).contiguous(), cursor, capacity, group, d**-0.5)

    token = torch.arange(low_bit, device=DEVICE)
    angle = (((token // group * group) * theta[:, None]).double() + ((token % group) * theta[:, None]).double()).T
    beta, gamma = (x.double()[:, :, None] for x in rows[:2])
    keys = (angle.cos() * beta + angle.sin() * gamma).repeat_interleave(queries, 1)
    query = q.double() * d**-0.5
    expected, size = query @ keys.mT, query.abs() @ keys.abs().mT
    assert ((shares[..., :low_bit] - expected).abs() / size).max() < 2e-6


@pytest.mark.parametrize("group", [32, 64])
def test_shares_of_a_stepped_center_are_those_of_each_rows_own_frequencies(group: int) -> None:
    """The fullest row has a plain mean as its center, the other row a rotating one."""
    heads, capacity, d = 2, 2048, 64
    q = torch.randn(2, 2 * heads, 1, d, device=DEVICE)
    stored = torch.randn(2, heads, 3, d, device=DEVICE)
    stored[:, :, 2] = 3 * 0.8 ** torch.arange(d, device=DEVICE)
    stored[0, :, 1:] = 0
    low_bit = torch.tensor([1920, 640])
    cursor = torch.stack([low_bit + 40, low_bit, low_bit, 0 * low_bit], 1).to(DEVICE)
    shares = triton_center.share_of_center(q, stored, cursor, capacity, group, d**-0.5)
    expected = center.share_of_groups(q.double().unflatten(1, (heads, 2)) * d**-0.5, stored.double(), capacity // group)
    for row, stop in enumerate((low_bit // group).tolist()):
        torch.testing.assert_close(
            shares[row, ..., :stop].double(), expected[row].flatten(0, 1)[..., :stop], atol=1e-4, rtol=0
        )


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float16, 2.0**-24), (torch.bfloat16, 2.0**-133)], ids=str)
def test_a_byte_is_a_16_bit_float_without_exponent(dtype: torch.dtype, unit: float) -> None:
    """The low-bit kernel unpacks codes this way, also in bfloat16, which the interpreter does not support."""
    byte = torch.arange(256, dtype=torch.int16)
    assert torch.equal(byte.view(dtype).double(), byte * unit)


@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
def test_decode_attention_is_split_over_programs_and_merged(rotate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of one head's tiers; empty splits add nothing."""
    case = Case(heads=1, length=1000, top_k=16, rotate=rotate)
    monkeypatch.setattr(triton_decode, "best_splits", lambda rows, tiles, slots: 9)
    monkeypatch.setattr(triton_exact, "exact_splits", lambda rows, blocks, device, programs: 3)
    layer = Layer(replace(case, length=500), tiers.append)
    layer.fill_slots()
    q, (k, v) = torch.randn(1, 2, 2, 64).to(DEVICE), torch.randn(2, 1, 1, 2, 64).to(DEVICE)
    cursor, state = layer.cursor[:1], {name: rows_of(name, tensor, slice(0, 1)) for name, tensor in layer.state.items()}
    read = [state[name] for name in StoredTiers._fields], (2, 2, rotate), 0.125, None
    slots = [state[name] for name in ("slots", "slot_index")]
    arguments = (q, k, v, None, None, cursor, *slots, *read)
    for out, expected in zip(
        triton_scored.decode_attention(*arguments), attention.decode_attention(*arguments), strict=True
    ):
        torch.testing.assert_close(out, expected, atol=TOLERANCE[torch.float32], rtol=TOLERANCE[torch.float32])
    inputs = (q, k, v, None, None, cursor, *read)
    *kept, scores = triton_scored.score_low_bit(*inputs)
    *expected_kept, expected_scores = attention.score_low_bit(*inputs)
    torch.testing.assert_close(scores, expected_scores, atol=1e-5, rtol=1e-5)
    step = (q, k, v, None, None, cursor)
    rest = (slots[1], *slots, *read)
    torch.testing.assert_close(
        triton_scored.attend_scored(*step, *kept, *rest), attention.attend_scored(*step, *expected_kept, *rest),
        atol=1e-5, rtol=1e-5,
    )  # fmt: skip


def test_splits_fill_the_gpu_and_end_together() -> None:
    """For heads of all rows, tiles of their low-bit tiers, and an H200's 2,112 concurrent programs.

    No schedule can end before the total work divided by the programs. The selected one ends within a quarter of that,
    or of the shortest splits.
    """
    slots = 2112
    for rows, tiles in [(8, 128), (8, 512), (64, 512), (176, 512), (512, 512), (2000, 32)]:
        splits = triton_decode.best_splits(rows, tiles, slots)
        assert 1 <= splits <= triton_decode.MOST_SPLITS
        share = -(-tiles // splits)
        least = max(rows * splits * share / slots, share)
        assert -(-rows * splits // slots) * share <= 1.25 * least + 4


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "mask"])
@pytest.mark.parametrize("tokens", [1, 7, 80])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.pairwise
def test_extend_attention(causal: bool, tokens: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_extend, "HOST_BLOCK", 48)  # several blocks, of which the last is partial
    length, heads, queries, d = 300, 2, 2, 80
    host = torch.randn(BATCH, heads, 512, 2, d)
    host[:, :, length:] = float("nan")
    host = in_pages(host)
    q = torch.randn(BATCH, heads * queries, tokens, d).to(DEVICE)
    k, v = torch.randn(2, BATCH, heads, tokens, d).to(DEVICE)
    mask = None if causal else torch.rand(BATCH, 1, tokens, length + tokens).to(DEVICE) > 0.3
    sinks = None if causal else torch.randn(heads * queries).to(DEVICE)
    cursor = cursor_over(host.table, length).to(DEVICE)
    arguments = (q, k, v, mask, sinks, cursor, host.pages, d**-0.5, softcap)
    expected = extend.extend_attention(*arguments)
    tolerance = TOLERANCE[torch.float32]
    torch.testing.assert_close(triton_extend.extend_attention(*arguments), expected, atol=tolerance, rtol=tolerance)


def test_extend_attention_over_codes_equals_that_over_decoded_pairs() -> None:
    codes = torch.randint(0, 120, (BATCH, 2, 256, 2, 16), dtype=torch.uint8).to(DEVICE)
    q, (k, v) = torch.randn(BATCH, 4, 1, 16).to(DEVICE), torch.randn(2, BATCH, 2, 1, 16).to(DEVICE)
    cursor = cursor_over(adjacent(BATCH, 256), 40).to(DEVICE)
    pairs = codes.view(torch.float8_e4m3fn).float()
    ours, theirs = (
        triton_extend.extend_attention(q, k, v, None, None, cursor, cache, 0.25, None) for cache in (codes, pairs)
    )
    assert torch.equal(ours, theirs)


def chosen(scores: Tensor, k: int) -> list[list[int]]:
    selected = torch.full((*scores.shape[:2], k), 7, dtype=torch.int32, device=DEVICE)
    select.select_topk(scores.to(DEVICE), selected)
    return [[token for token in row if token >= 0] for row in selected.flatten(0, 1).tolist()]


@pytest.mark.parametrize(("capacity", "k"), [(256, 8), (300, 64), (5000, 1), (5000, 64), (9000, 100), (256, 400)])
def test_selection_is_exactly_the_largest(capacity: int, k: int) -> None:
    scores = torch.rand(BATCH, 2, capacity).pow(20)
    scores[:, :, capacity - 50 :] = -1.0
    expected = scores.topk(min(k, capacity - 50)).indices.sort().values.flatten(0, 1).tolist()
    assert chosen(scores, k) == expected


def test_selection_breaks_ties_by_position_and_takes_no_token_that_is_hidden() -> None:
    scores = torch.full((1, 1, 5000), -1.0)
    scores[0, 0, 100:4900:7] = 0.25
    scores[0, 0, 4898] = 0.5
    assert chosen(scores, 4) == [[100, 107, 114, 4898]]
    scores[scores > 0] = 0.0  # a share that underflows float32 is still a candidate
    assert chosen(scores, 2) == [[100, 107]]
    assert chosen(torch.full((1, 1, 300), -1.0), 3) == [[]]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace streams, which the interpreter does not have; it reads any memory."""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(copy_stream, "correction_stream_of", lambda device: mock.MagicMock())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: mock.MagicMock())
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


def test_a_correction_copies_the_low_bit_tokens_that_lane_0_selects(streams: None) -> None:
    capacity, heads, k, low_bit = 5120, 2, 8, 4500
    pages = in_pages(torch.randn(BATCH, heads, capacity, 2, 16))
    host = pages.pages.pin_memory() if DEVICE.type == "cuda" else pages.pages
    scores = torch.rand(2, BATCH, heads, capacity).to(DEVICE)
    scores[..., low_bit : low_bit + 20] += 1.0  # the next step's candidates, not in the low-bit tier yet
    cursor = cursor_over(pages.table, low_bit + 40, low_bit, low_bit + 20).to(DEVICE)

    def corrected(correct: Any) -> tuple[Tensor, ...]:
        index = torch.arange(k, dtype=torch.int32, device=DEVICE).repeat(BATCH, heads, 1)
        slots = tokens_of(pages, 0, k).to(DEVICE, copy=True)
        moved = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        chosen = correct(scores, cursor, host, slots, index, moved)
        copy_stream.wait_for_correction(slots)
        assert torch.equal(chosen.sort(-1).values, index.sort(-1).values)
        order = index.sort(-1).indices
        where = order[..., None, None].expand(-1, -1, -1, 2, 16)
        return index.gather(-1, order), slots.gather(2, where), moved

    ours, expected = corrected(copy_stream.correct), corrected(tiers.correct)
    assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))
    assert expected[2] > 0


def test_a_corrections_gather_has_a_program_for_each_head(monkeypatch: pytest.MonkeyPatch, streams: None) -> None:
    grids = []
    monkeypatch.setattr(triton_copy, "gather", lambda *given, programs: grids.append(programs))
    index = torch.zeros(BATCH, 24, 8, dtype=torch.int32, device=DEVICE)
    scores = torch.rand(1, BATCH, 24, 64).to(DEVICE)
    cursor = torch.tensor([[64, 64, 64, 0]], device=DEVICE).repeat(BATCH, 1)
    copy_stream.correct(scores, cursor, index, index, index, index)
    assert grids == [BATCH * 24]


@pytest.mark.parametrize("k", [1, 8, 64, 300])
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("programs", [1, 3, 4])  # for four heads
def test_the_gather_copies_only_missing_pairs(k: int, dtype: torch.dtype, programs: int) -> None:
    capacity, heads, d = 512, 2, 80
    pairs = torch.randn(BATCH, heads, capacity, 2, d).to(dtype)
    pages = in_pages(pairs)
    cursor = cursor_over(pages.table).to(DEVICE)
    host = pages.pages.pin_memory() if DEVICE.type == "cuda" else pages.pages
    slots = torch.zeros(BATCH, heads, k, 2, d, dtype=dtype, device=DEVICE)
    index = torch.full((BATCH, heads, k), -1, dtype=torch.int32, device=DEVICE)
    fetched = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    travelled = 0
    for step in range(6):
        near = torch.Generator().manual_seed(step)
        wishes = [
            torch.randperm(min(capacity, 2 * k), generator=near)[: max(0, k - row * step)]
            for row in range(BATCH * heads)
        ]
        selected = torch.full((BATCH, heads, k), -1, dtype=torch.int32)
        for row, wish in enumerate(wishes):
            selected[row // heads, row % heads, : len(wish)] = wish
        before = index.tolist()
        triton_copy.gather(selected.to(DEVICE), cursor, host, slots, index, fetched, programs)
        for row, wish in enumerate(wishes):
            b, h = row // heads, row % heads
            now = {token: place for place, token in enumerate(index[b, h].tolist()) if token >= 0}
            assert set(now) == set(wish.tolist())
            assert (index[b, h] >= 0).sum() == len(wish)
            had = {token: place for place, token in enumerate(before[b][h]) if token >= 0}
            travelled += len(set(now) - set(had)) * 2 * d * dtype.itemsize
            assert all(now[token] == place for token, place in had.items() if token in now)
            assert torch.equal(slots[b, h, [*now.values()]].cpu(), pairs[b, h, [*now]])
    assert fetched.item() == travelled


@pytest.mark.parametrize("start", [30, 250, 256])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_new_pairs_are_written_through_to_their_place_on_the_host(tokens: int, start: int) -> None:
    pages = in_pages(torch.zeros(BATCH, 2, 512, 2, 80))
    host = pages.pages.pin_memory() if DEVICE.type == "cuda" else pages.pages
    k, v = torch.randn(2, BATCH, tokens, 2, 80).to(DEVICE).transpose(2, 3)
    triton_copy.write_through(k, v, cursor_over(pages.table, start).to(DEVICE), host)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    expected = torch.zeros(BATCH, 2, 512, 2, 80)
    expected[:, :, start : start + tokens] = torch.stack([k, v], 3).cpu()
    assert torch.equal(host, in_pages(expected).pages)


def compiled(*given: str) -> str:
    """Return the output of compiling the kernels without a GPU, in a separate process, since a process that interprets
    kernels cannot compile them."""
    script = Path(__file__).parents[2] / "tools" / "compile_kernels.py"
    done = subprocess.run(
        [sys.executable, str(script), "--in-turn", *given], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_attention_compiles_where_a_key_has_the_fewest_bytes() -> None:
    printed = compiled("--only=fp32, 1 bit, d 16")
    assert "score_keys" in printed
    assert "sum_values" in printed
    assert "quantize_groups" in printed


@pytest.mark.slow
def test_every_kernel_compiles_for_the_gpus_that_are_supported() -> None:
    """Both GPU architectures; each kernel except the smallest has several shapes."""
    printed = compiled()
    assert printed.count("sm_90") + printed.count("sm_80") > 50
