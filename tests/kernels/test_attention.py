"""Attention over the tiers against a float64 reference over the cache in position order.

The tiers contain random numbers instead of our quantiser's output. NaN fills all elements that must not be read.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from held_tiers import adjacent, cursor_over, in_pages
from specache_compile.kernels.attention.attention_ops import BLOCK
from specache_compile.kernels.codes.records import (
    RECORD,
    by_token,
    fields_of,
    in_thread_order,
    param_order,
    read_levels,
    stored_dim,
    write_levels,
)
from specache_compile.kernels.op import registered
from specache_compile.kernels.state.page_table import LOW_BIT_TIER, shape_of_scores
from specache_compile.kernels.state.stored_tiers import StoredTiers

pytestmark = pytest.mark.pairwise

# The same tests cover every implementation of the op.
DECODE_OPS = [op.name for op in registered() if op.name.startswith(("decode_attention", "score_low_bit"))]
# Error of float32 sums of a few hundred terms of size 1; the float64 reference has no such error.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


@pytest.fixture(params=DECODE_OPS)
def op(request: pytest.FixtureRequest) -> str:
    return request.param


@dataclass(frozen=True)
class Case:
    """Shapes of one decode step: `length` cached tokens, the newest R..R+g-1 of them in the recent tier."""

    length: int = 200
    lanes: int = 2
    batch: int = 2
    heads: int = 2
    ratio: int = 2
    head_dim: int = 16
    bits: int = 2
    value_bits: int | None = None
    rotate: bool = False
    trellis: bool = False
    key_trellis: bool = False
    eight: bool = False
    center: bool = False
    group: int = 32
    residual: int = 32
    top_k: int = 24
    filled: int = 20
    sink_tokens: int = 0
    mask: str = "none"
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def layout(self) -> tuple[int, int, bool]:
        return self.bits, self.value_bits or self.bits, self.rotate

    def low_bit(self, length: int) -> int:
        return self.group * max(0, (length - self.residual) // self.group)

    def __str__(self) -> str:
        """Return the fields that have no default value."""
        return ", ".join(
            f"{f.name} {getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default
        )


@dataclass
class Step:
    """One decode step's tensors, for the op, and for the reference in position order and float64."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    sinks: Tensor | None
    cursor: Tensor
    state: dict[str, Tensor]
    keys: Tensor
    values: Tensor
    # Like `keys`, with empty slots.
    unfetched_keys: Tensor

    def run(self, op: str) -> tuple[Tensor, Tensor]:
        """Return the output and the last lane's scores. The two halves of a corrected attention run as one op, whose
        scores use low-bit pairs alone: they equal those of a step with empty slots."""
        tiers = [self.state[name] for name in StoredTiers._fields]
        read = (tiers, [int(value) for value in self.case.layout], self.case.head_dim**-0.5, self.case.softcap)
        step = (self.mask, self.sinks, self.cursor)
        slots = (self.state["slots"], self.state["slot_index"])
        if not op.startswith("score"):
            return getattr(torch.ops.specache, op)(self.q, self.k, self.v, *step, *slots, *read)
        *kept, scores = getattr(torch.ops.specache, op)(self.q, self.k, self.v, *step, *read)
        given = (self.q, self.k, self.v, *step, *kept, slots[1].flip(-1), *slots, *read)
        return getattr(torch.ops.specache, op.replace("score_low_bit", "attend_scored"))(*given), scores[-1]


def make_step(case: Case, seed: int = 0) -> Step:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    rows, d, n, bits = (case.batch, case.heads), case.head_dim, case.length, case.bits
    low_bit = case.low_bit(n)
    truth = normal(*rows, n, 2, d)
    keys, values = truth.double().unbind(3)

    capacity = 256 * (n // 256 + 1)
    window = case.residual + case.group
    recent = torch.full((*rows, window, 2, d), math.nan, dtype=case.dtype)
    for token in range(low_bit, n):
        recent[:, :, token % window] = truth[:, :, token]
    if bits == 16:
        codes = torch.full((*rows, capacity, 2, d), math.nan, dtype=case.dtype)
        codes[:, :, :low_bit] = normal(*rows, low_bit, 2, d)
        key_params, value_params = codes.new_empty((*rows, 0, 2, d)), codes.new_empty((*rows, 0, 2, 1))
        stored_keys, stored_values = codes[:, :, :low_bit].double().unbind(3)
        codes = codes.flatten(3)
    else:
        key_bits, value_bits, _ = case.layout
        dim, whole = stored_dim(d), -(-low_bit // RECORD) * RECORD
        gv = min(dim, case.group)
        shape = (*rows, capacity, dim * (key_bits + value_bits) // 8)
        codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        key_params = torch.full((*rows, capacity // case.group, 2, dim), math.nan, dtype=case.dtype)
        value_params = torch.full((*rows, capacity, 2, dim // gv), math.nan, dtype=case.dtype)
        key_params[:, :, : low_bit // case.group] = normal(*rows, low_bit // case.group, 2, dim) / 2**key_bits
        value_params[:, :, :low_bit] = normal(*rows, low_bit, 2, dim // gv) / 2**value_bits
        if case.trellis:
            value_params = value_params[:, :, :, :1, :1].contiguous()
        if case.key_trellis:
            key_params = torch.full((*rows, capacity // case.group, 1, case.group), math.nan, dtype=case.dtype)
            key_params[:, :, : low_bit // case.group] = normal(*rows, low_bit // case.group, 1, case.group)
        if case.eight:
            key_params, value_params = in_bytes(key_params, generator), in_bytes(value_params, generator)
        group_of = torch.arange(low_bit) // case.group
        scale, zero = read_params(key_params[:, :, : low_bit // case.group])
        if case.key_trellis:
            levels = read_trellis(codes[:, :, :whole], dim, False)[:, :, :low_bit]
            stored_keys = (levels - 1.5) * scale.flatten(2)[..., None]
        else:
            place = param_order(dim, key_bits).argsort()
            levels = read_levels(codes[:, :, :whole], dim, key_bits, values=False)[:, :, :low_bit]
            stored_keys = levels.double() * scale[:, :, group_of][..., place] + zero[:, :, group_of][..., place]
        scale, zero = read_params(value_params[:, :, :low_bit])
        if case.trellis:
            levels = read_trellis(codes[:, :, :whole], dim, True)[:, :, :low_bit]
            stored_values = (levels - 1.5) * in_thread_order(scale.squeeze(-1)).unsqueeze(-1)
        else:
            channel = torch.arange(dim) // gv
            levels = read_levels(codes[:, :, :whole], dim, value_bits, values=True)[:, :, :low_bit]
            stored_values = levels.double() * scale[..., channel] + zero[..., channel]
        stored_keys, stored_values = stored_keys[..., :d], stored_values[..., :d]
        if case.rotate:
            stored_keys, stored_values = turned(stored_keys), turned(stored_values)
    center = torch.zeros(*rows, 0, d)
    if case.center:
        center, waves = make_center(low_bit, normal(*rows, d).float() * 20)
        stored_keys = stored_keys + waves
    elif case.key_trellis:  # constant within a group, rotating from group to group
        center = normal(*rows, 3, d).float()
        center[:, :, 2] = 0.7 ** torch.arange(d)
        beta, gamma, theta = center.double()[:, :, :, None].unbind(2)
        angle = (torch.arange(low_bit) // case.group)[:, None] * theta
        stored_keys = stored_keys + angle.cos() * beta + angle.sin() * gamma

    # Row b's sinks begin at its token 3·b; its last sink is still empty.
    sink_index = torch.arange(case.sink_tokens).int() + 3 * torch.arange(case.batch).int().view(-1, 1, 1)
    sink_index[..., -1:] = -1
    sink_pairs = torch.full((*rows, case.sink_tokens, 2, d), math.nan, dtype=case.dtype)
    for b in range(case.batch):
        for place, token in enumerate(sink_index[b, 0].tolist()):
            if 0 <= token < low_bit:
                sink_pairs[b, :, place] = truth[b, :, token]
                stored_keys[b, :, token], stored_values[b, :, token] = keys[b, :, token], values[b, :, token]

    unfetched_keys = torch.cat([stored_keys, keys[:, :, low_bit:]], 2)
    slots = torch.full((*rows, case.top_k, 2, d), math.nan, dtype=case.dtype)
    slot_index = torch.full((*rows, case.top_k), -1, dtype=torch.int32)
    for b in range(case.batch):
        for h in range(case.heads):
            fetched = torch.randperm(low_bit, generator=generator)
            fetched = fetched[~torch.isin(fetched, sink_index[b])][: case.filled]
            places = torch.randperm(case.top_k, generator=generator)[: len(fetched)]
            slot_index[b, h, places] = fetched.int()
            slots[b, h, places] = truth[b, h, fetched]
            stored_keys[b, h, fetched], stored_values[b, h, fetched] = keys[b, h, fetched], values[b, h, fetched]
    keys[:, :, :low_bit], values[:, :, :low_bit] = stored_keys, stored_values

    q, k, v = (normal(case.batch, heads, case.lanes, d) for heads in (case.heads * case.ratio, case.heads, case.heads))
    return Step(
        case,
        q=q,
        k=k,
        v=v,
        mask=make_mask(case.mask, case.batch, case.heads * case.ratio, case.lanes, n, 1, generator),
        sinks=normal(case.heads * case.ratio) if case.sinks else None,
        cursor=cursor_over(adjacent(case.batch, capacity), n, low_bit, case.low_bit(n + 1)),
        state={
            "codes": in_pages(codes, capacity).pages,
            "key_params": in_pages(key_params, capacity).pages,
            "value_params": in_pages(value_params, capacity).pages,
            "center": center,
            "sink_pairs": sink_pairs,
            "sink_index": sink_index,
            "recent": recent,
            "slots": slots,
            "slot_index": slot_index,
        },
        keys=keys,
        values=values,
        unfetched_keys=unfetched_keys,
    )


def make_center(tokens: int, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return the center for a mean [B, H, d], and its value at each token, float64 [B, H, n, d].

    RoPE uses complex numbers, over all channels except the last two.
    """
    d = mean.shape[-1]
    half = d // 2 - 1
    frequencies = 0.7 ** torch.arange(half, dtype=torch.float64)
    pairs = torch.complex(mean[..., :half].double(), mean[..., half : 2 * half].double())
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * frequencies.float().double()
    waves = pairs.unsqueeze(2) * torch.polar(torch.ones_like(angles), angles)
    quarter, still = torch.view_as_real(pairs * 1j).unbind(-1), mean[..., 2 * half :]
    channel = torch.arange(1, half + 1)
    rows = [
        mean,
        torch.cat([*quarter, torch.zeros_like(still)], -1),
        torch.cat([frequencies, frequencies, torch.zeros(2)]).expand_as(mean),
        torch.cat([-(channel + half), channel, torch.zeros(2)]).expand_as(mean),
    ]
    still = still.double().unsqueeze(2).expand(-1, -1, tokens, -1)
    return torch.stack([row.float() for row in rows], 2), torch.cat([waves.real, waves.imag, still], -1)


def turned(x: Tensor) -> Tensor:
    """Multiply x [..., d] by each block's Hadamard matrix, whose signs are the parity of the common bits of i and j."""
    d = x.shape[-1]
    block = next(size for size in (256, 128, 64, 32, 16, 8, 4, 2, 1) if d % size == 0)
    signs = [[1 - 2 * ((i & j).bit_count() % 2) for j in range(block)] for i in range(block)]
    return (x.unflatten(-1, (-1, block)) @ (torch.tensor(signs).double() / math.sqrt(block))).flatten(-2)


def read_trellis(codes: Tensor, dim: int, values: bool) -> Tensor:
    """Return a trellis code's levels q as float64 [B, H, C, D], from each number's bit and the three before it."""
    circles = fields_of(codes, dim, 1, values).long().unflatten(-1, (-1, 32))
    b = [circles.roll(back, -1) for back in range(4)]
    return by_token((2 * (b[0] ^ b[1] ^ b[3]) + b[2]).flatten(-2), dim, 1, values).double()


def in_bytes(params: Tensor, generator: torch.Generator) -> Tensor:
    """Return 8-bit params: scales around a quarter, zero points of all possible eighths, NaN scales for NaN params."""
    stored = torch.randint(0, 256, params.shape, dtype=torch.uint8, generator=generator)
    stored[..., :1, :] = torch.randint(90, 106, stored[..., :1, :].shape, dtype=torch.uint8, generator=generator)
    return stored.masked_fill(params.isnan(), 255)


def read_params(params: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and zero point as float64, for 8 bits by the formula of `params.py`; a trellis has no zero point."""
    if params.dtype != torch.uint8:
        scale, zero = params.double()[..., 0, :], params.double()[..., -1, :]
    else:
        scale = (1 + (params[..., 0, :] & 7).double() / 8) * 2.0 ** ((params[..., 0, :] >> 3).double() - 15)
        zero = params[..., -1, :].view(torch.int8).double() / 8 * scale
    return scale, zero


def make_mask(
    kind: str, batch: int, heads: int, queries: int, past: int, new: int, generator: torch.Generator
) -> Tensor | None:
    """Return a mask [B|1, Hq|1, Q|1, past + new]; padding hides each row's first tokens, more in later rows."""
    columns = past + new
    padding = torch.arange(columns) >= (torch.arange(batch) * max(past // 3, 1)).view(-1, 1, 1, 1)
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if kind == "none":
        return None
    if kind == "padding":
        return padding
    if kind == "padding each lane":
        return padding.expand(batch, 1, queries, columns).contiguous()
    if kind == "longer than the cache":
        return torch.cat([padding, torch.zeros(batch, 1, 1, 7, dtype=torch.bool)], -1)
    if kind == "random":
        seen = torch.rand(batch, heads, queries, columns, generator=generator) < 0.5
        seen[..., past:] = True
        return seen
    if kind == "position bias":
        slope = torch.linspace(0.05, 0.001, heads).view(1, heads, 1, 1)
        return slope * (torch.arange(columns) - past)
    if kind == "nothing is seen":
        return torch.zeros(batch, 1, 1, columns, dtype=torch.bool)
    dtype = dtypes[kind.removeprefix("additive ")]
    return torch.zeros(padding.shape, dtype=dtype).masked_fill(~padding, torch.finfo(dtype).min)


def reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    causal: Tensor,
    sinks: Tensor | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Textbook attention in float64: output [B, Hq, Q, d] and probabilities [B, Hq, Q, n]; `causal` bool [Q, n]."""
    ratio = q.shape[1] // keys.shape[1]
    keys, values = keys.double().repeat_interleave(ratio, 1), values.double().repeat_interleave(ratio, 1)
    logits = q.double() @ keys.transpose(2, 3) * q.shape[-1] ** -0.5
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    if mask is not None:
        bias = mask.double().log() if mask.dtype == torch.bool else mask.double()
        logits = logits + bias
    logits = logits.masked_fill(~causal, -math.inf)
    sink = logits.new_full((*logits.shape[:3], 1), -math.inf)
    if sinks is not None:
        sink = sinks.double().view(1, -1, 1, 1).expand_as(sink)
    probabilities = torch.cat([logits, sink], -1).softmax(-1)[..., :-1].nan_to_num(0.0)
    return probabilities @ values, probabilities


def expected_of(step: Step, op: str) -> tuple[Tensor, Tensor]:
    """Return the reference's output and selection scores."""
    case, n = step.case, step.case.length
    mask = step.mask
    if mask is not None:  # both lanes' new pairs share the mask's last column
        mask = torch.cat([mask[..., :n], mask[..., n : n + 1].expand(*mask.shape[:-1], case.lanes)], -1)
    causal = torch.ones(case.lanes, n + case.lanes, dtype=torch.bool).tril(n)
    keys, values = torch.cat([step.keys, step.k.double()], 2), torch.cat([step.values, step.v.double()], 2)
    out, probabilities = reference(step.q, keys, values, mask, causal, step.sinks, case.softcap)
    if op.startswith("score"):
        keys = torch.cat([step.unfetched_keys, step.k.double()], 2)
        _, probabilities = reference(step.q, keys, values, mask, causal, step.sinks, case.softcap)
    scores = probabilities[:, :, -1].unflatten(1, (case.heads, case.ratio)).sum(2)
    if mask is not None:
        hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min
        hidden = hidden.expand(case.batch, case.heads * case.ratio, case.lanes, -1)[:, :, -1]
        scores = scores.masked_fill(hidden.unflatten(1, (case.heads, case.ratio)).all(2), -1.0)
    selection = torch.full(shape_of_scores(step.state["codes"], step.cursor), -1.0, dtype=torch.float64)
    candidates = min(case.low_bit(n + 1), n)
    selection[:, :, :candidates] = scores[:, :, :candidates]
    for row, tokens in enumerate(step.state["sink_index"][:, 0].tolist()):
        selection[row, :, [token for token in tokens if token >= 0]] = -1.0
    return out, selection


def check(op: str, case: Case, seed: int = 0) -> None:
    step = make_step(case, seed)
    out, scores = step.run(op)
    expected, expected_scores = expected_of(step, op)
    assert out.dtype == case.dtype
    torch.testing.assert_close(out.double(), expected, **CLOSE)
    torch.testing.assert_close(scores.double(), expected_scores, **CLOSE)
    assert torch.equal(scores == -1, expected_scores == -1)


def grid(**axes: Sequence[Any]) -> list[Case]:
    """Return the cases of a grid; an axis `a__b` has values for both fields."""
    cases = []
    for values in itertools.product(*axes.values()):
        pairs = zip(axes, values, strict=True)
        fields = (zip(axis.split("__"), value if "__" in axis else (value,), strict=True) for axis, value in pairs)
        cases.append(Case(**dict(itertools.chain.from_iterable(fields))))
    return cases


HEAD_DIMS, MORE_HEAD_DIMS = (16, 64, 80, 96), (8, 64, 72, 80, 96, 128, 256)
MASKS = (
    "padding", "padding each lane", "random", "position bias", "longer than the cache", "additive float32",
    "additive bfloat16", "additive float16",
)  # fmt: skip
LONG = {"length": (350,)}
TURNED = {**LONG, "rotate": (True,)}
CASES = [
    *grid(head_dim=HEAD_DIMS, bits=(1, 2, 4, 8, 16)),
    *grid(head_dim=HEAD_DIMS, bits__value_bits=((2, 1), (1, 2), (4, 1), (1, 8), (2, 2)), mask=("padding",), **TURNED),
    *grid(
        head_dim=MORE_HEAD_DIMS, eight=(False, True), **TURNED,
        bits__value_bits__trellis=((2, 1, True), (1, 1, True), (2, 1, False), (4, 2, False)),
    ),
    # A trellis of keys subtracts a stepped center, or one of waves.
    *grid(
        head_dim=MORE_HEAD_DIMS, bits=(1,), key_trellis=(True,), **LONG,
        value_bits__trellis=((1, True), (1, False), (2, False)),
        rotate__eight__mask__softcap=((True, True, "padding", 30.0), (False, False, "none", None)),
    ),
    *grid(head_dim=(64,), bits=(1,), key_trellis=(True,), center=(False, True), rotate=(True,), sink_tokens=(3,)),
    *grid(head_dim=(16, 80), rotate=(False, True), center=(True,), mask=("padding",), softcap=(30.0,), **LONG),
    *grid(group=(32, 64, 128), bits=(1, 2, 16), head_dim=(64,), **LONG),
    *grid(heads=(1, 3), ratio=(1, 2, 4, 7), lanes=(1, 2)),
    *grid(mask=MASKS, bits=(2, 16), batch=(3,)),
    *grid(softcap__sinks=((None, True), (2.0, False), (2.0, True)), lanes=(1, 2), mask=("none", "padding")),
    *grid(length__mask=((64, "none"), (128, "padding")), lanes=(11,), softcap=(2.0,), sinks=(True,)),
    # W is 64: from an empty low-bit tier, past the step that fills a group, to a ring that has wrapped.
    *grid(length=(1, 31, 63, 64, 65, 95, 96, 127, 128), lanes=(1, 2)),
    # With R = 0 the new token is in the low-bit tier, but no candidate, since its pair has not reached the host.
    *grid(length=(31, 32, 33, 63, 64, 100), residual=(0, 20, 45)),
    *grid(
        length=tuple(low_bit + 40 for low_bit in (BLOCK - 32, BLOCK, BLOCK + 32, 2 * BLOCK + 96)),
        mask=("none", "padding", "additive float32"), heads=(1,), filled=(24,),
    ),
    *grid(filled=(0, 1, 24), mask=("none", "padding")),
    # Sinks in the low-bit tier, in the window, and in the group that leaves the window in this step.
    *grid(
        sink_tokens=(1, 5, 40), mask=("none", "padding", "position bias"), length=(40, 63, 64, 70, 200), batch=(3,)
    ),
    *grid(
        sink_tokens=(9,), bits=(1, 4, 16), lanes=(1, 2), sinks=(True,), softcap=(3.0,), head_dim=(64,), **TURNED
    ),
    Case(length=64, top_k=80, filled=80),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_scores_are_the_references(op: str, case: Case) -> None:
    check(op, case)


def test_unquantised_pairs_are_not_turned(op: str) -> None:
    case = Case(bits=16)
    assert torch.equal(make_step(case).run(op)[0], make_step(replace(case, rotate=True)).run(op)[0])


def test_the_low_bit_codes_of_sink_tokens_do_not_matter(op: str) -> None:
    step = make_step(Case(sink_tokens=8))
    out, scores = step.run(op)
    codes = step.state["codes"]
    for values in (False, True):
        levels = read_levels(codes, 16, 2, values)
        levels[0, :, :7] ^= 3
        write_levels(levels, 0, codes, 2, values)
    again, scores_again = step.run(op)
    assert torch.equal(out, again)
    assert torch.equal(scores, scores_again)


def test_without_slots_nothing_is_scored(op: str) -> None:
    step = make_step(Case(top_k=0, filled=0))
    out, scores = step.run(op)
    torch.testing.assert_close(out.double(), expected_of(step, op)[0], **CLOSE)
    assert op.startswith("score") or (scores == -1).all(), "a corrected step has slots"


def test_a_slot_of_a_token_still_in_the_recent_tier_is_not_read(op: str) -> None:
    """A pre-decode may select tokens that leave the window only in the next decode step."""
    step = make_step(Case(length=200, filled=20))
    out, scores = step.run(op)
    empty = step.state["slot_index"] == -1
    step.state["slot_index"][empty] = step.case.low_bit(200) + 3
    again, scores_again = step.run(op)
    assert torch.equal(out, again)
    assert torch.equal(scores, scores_again)


def test_a_row_that_sees_nothing_gives_zero(op: str) -> None:
    out, scores = make_step(Case(mask="nothing is seen")).run(op)
    assert (out == 0).all()
    assert (scores == -1).all()


def test_with_every_pair_fetched_the_codes_do_not_matter(op: str) -> None:
    step = make_step(Case(length=160, top_k=128, filled=128))
    out, _ = step.run(op)
    step.state["codes"].fill_(255)
    assert torch.equal(step.run(op)[0], out)


def test_a_sink_far_above_every_logit_takes_the_attention(op: str) -> None:
    step = make_step(Case(sinks=True))
    assert step.sinks is not None
    step.sinks.fill_(200.0)
    out, scores = step.run(op)
    assert (out == 0).all()
    assert (scores[:, :, : step.case.low_bit(step.case.length)] == 0).all()


def test_lane_0_does_not_depend_on_lane_1(op: str) -> None:
    step = make_step(Case())
    both, _ = step.run(op)
    alone = replace(step, q=step.q[:, :, :1], k=step.k[:, :, :1], v=step.v[:, :, :1])
    torch.testing.assert_close(both[:, :, :1], alone.run(op)[0], **CLOSE)


def test_large_logits_do_not_overflow(op: str) -> None:
    step = make_step(Case(filled=4))
    step.q *= 3e3
    out, scores = step.run(op)
    expected, expected_scores = expected_of(step, op)
    # Logits of a few thousand have a float32 error of about 1e-3, which is the weights' relative error.
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(scores.double(), expected_scores, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [1, 2, 16])
def test_half_precision_inputs_cost_one_rounding_of_the_output(op: str, bits: int, dtype: torch.dtype) -> None:
    """Sums are float32, and the reference has the same rounded inputs, so half an ulp of the output's dtype remains."""
    step = make_step(Case(dtype=dtype, bits=bits, mask="padding", sinks=True, head_dim=64))
    out, scores = step.run(op)
    expected, expected_scores = expected_of(step, op)
    assert (out.dtype, scores.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps / 2 + 1e-4, atol=2e-5)
    torch.testing.assert_close(scores.double(), expected_scores, **CLOSE)


def test_a_mask_shorter_than_the_cache_is_refused(op: str) -> None:
    step = make_step(Case())
    step.mask = torch.ones(2, 1, 1, 200, dtype=torch.bool)
    with pytest.raises(ValueError, match="covers 200 tokens, but the cache and the new ones are 201"):
        step.run(op)


# Chunked prefill: exact attention over the host tier


@dataclass(frozen=True)
class Extend:
    """Shapes of a chunked prefill of `tokens` new tokens after `length` cached ones."""

    length: int = 100
    tokens: int = 12
    mask: str = "none"
    batch: int = 2
    heads: int = 2
    ratio: int = 2
    head_dim: int = 16
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32


EXTENDS = (
    *(Extend(length, tokens) for length in (0, 1, 100) for tokens in (1, 2, 37)),
    *(Extend(BLOCK * blocks + more, 9, mask) for blocks, more in ((1, -1), (1, 0), (1, 1), (2, 5))
      for mask in ("none", "padding", "additive float32")),
    *(Extend(mask=mask, batch=3) for mask in MASKS if mask not in ("padding each lane", "longer than the cache")),
    *(Extend(70, 5, ratio=ratio, head_dim=head_dim) for ratio in (1, 2, 4) for head_dim in HEAD_DIMS),
    *(Extend(70, 5, mask, softcap=softcap, sinks=sinks) for mask in ("none", "padding")
      for softcap, sinks in ((None, True), (2.0, False), (2.0, True))),
    *(Extend(mask="padding", sinks=True, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)),
    # Left padding causes rows that see nothing: a chunk's padded queries see no key.
    *(Extend(length, 4, "nothing is seen") for length in (0, 100)),
)  # fmt: skip


@pytest.mark.parametrize("case", EXTENDS, ids=str)
def test_extend_is_the_references(case: Extend) -> None:
    length, tokens, mask, batch, heads, ratio, head_dim, softcap, sinks, dtype = astuple(case)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    host = torch.full((batch, heads, 256 * (length // 256 + 1), 2, head_dim), math.nan, dtype=dtype)
    host[:, :, :length] = normal(batch, heads, length, 2, head_dim)
    q = normal(batch, heads * ratio, tokens, head_dim)
    k, v = normal(batch, heads, tokens, head_dim), normal(batch, heads, tokens, head_dim)
    sink = normal(heads * ratio) if sinks else None
    causal = torch.ones(tokens, length + tokens, dtype=torch.bool).tril(length)
    given = make_mask(mask, batch, heads * ratio, tokens, length, tokens, generator)
    if given is not None:  # Hugging Face's masks are causal themselves
        causal_too = given & causal if given.dtype == torch.bool else given.masked_fill(~causal, -math.inf)
        given = causal_too[..., : length + tokens]
    pages = in_pages(host)
    keys, values = torch.cat([host[:, :, :length, 0], k], 2), torch.cat([host[:, :, :length, 1], v], 2)
    expected, _ = reference(q, keys, values, given, causal, sink, softcap)
    # torch's kernel rounds weights too.
    eps = torch.finfo(dtype).eps
    for op, roundings in ((torch.ops.specache.extend_attention, 0.5), (torch.ops.specache.extend_attention_fused, 2)):
        out = op(q, k, v, given, sink, cursor_over(pages.table, length), pages.pages, head_dim**-0.5, softcap)
        assert out.dtype == dtype
        assert out.is_contiguous(), "its fake is contiguous"
        rounding = {"rtol": roundings * eps + 1e-4, "atol": 2e-5 + (roundings > 1) * eps}
        torch.testing.assert_close(out.double(), expected, **rounding)


EXTEND_OPS = [torch.ops.specache.extend_attention, torch.ops.specache.extend_attention_fused]


@pytest.mark.parametrize("op", EXTEND_OPS)
@pytest.mark.parametrize("padding", [3, 5, 9], ids=["a part of the chunk", "the whole chunk", "more than the chunk"])
def test_new_tokens_of_padding_attend_to_nothing(op: Any, padding: int) -> None:
    q, k, v = torch.randn(1, 2, 5, 16), torch.randn(1, 1, 5, 16), torch.randn(1, 1, 5, 16)
    host = torch.full((1, 1, 256, 2, 16), math.nan)
    out = op(q, k, v, None, None, cursor_over(adjacent(1, 256), -padding), host, 0.25, None)
    assert out.shape == q.shape
    assert not out[:, :, :padding].any()
    for row in range(padding, 5):
        weights = (q[0, :, row] @ k[0, 0, padding : row + 1].T * 0.25).softmax(-1)
        torch.testing.assert_close(out[0, :, row], weights @ v[0, 0, padding : row + 1])


@pytest.mark.parametrize("op", EXTEND_OPS)
@pytest.mark.parametrize("length", [0, 100, 3 * BLOCK])
def test_a_row_of_the_lowest_number_is_a_mean_of_the_values(op: Any, length: int) -> None:
    """An additive mask of the lowest finite number hides nothing from a softmax if it is everywhere."""
    q, k, v = torch.randn(1, 2, 4, 16), torch.randn(1, 1, 4, 16), 1 + 0.1 * torch.rand(1, 1, 4, 16)
    host = 1 + 0.1 * torch.rand(length // 256 + 1, 1, 256, 2, 16)
    mask = torch.full((1, 1, 4, length + 4), torch.finfo(torch.float32).min)
    cursor = cursor_over(torch.arange(len(host))[None], length)
    out = op(q, k, v, mask, None, cursor, host, 0.25, None)
    assert out.min() >= 1 - 1e-5
    assert out.max() <= 1.1 + 1e-5


@pytest.mark.parametrize("op", EXTEND_OPS)
def test_extend_refuses_a_mask_that_covers_too_few_tokens(op: Any) -> None:
    q, host = torch.randn(1, 2, 3, 16), torch.zeros(1, 1, 256, 2, 16)
    mask = torch.ones(1, 1, 1, 101, dtype=torch.bool)
    with pytest.raises(ValueError, match="covers 101 tokens, but the cache and the new ones are 103"):
        op(q, q[:, :1], q[:, :1], mask, None, cursor_over(adjacent(1, 256), 100), host, 0.25, None)


def test_extend_takes_queries_and_keys_of_any_strides() -> None:
    def turned(*shape: int) -> Tensor:
        return torch.randn(*shape[:2], shape[3], shape[2]).mT

    q, k, v, host = turned(1, 2, 5, 16), turned(1, 1, 5, 16), turned(1, 1, 5, 16), torch.randn(1, 1, 256, 2, 16)
    given = (None, None, cursor_over(adjacent(1, 256), 100), host, 0.25, None)
    expected = torch.ops.specache.extend_attention(q, k, v, *given)
    torch.testing.assert_close(torch.ops.specache.extend_attention_fused(q, k, v, *given), expected)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_another_default_dtype_changes_nothing(op: str, default: torch.dtype) -> None:
    step = make_step(Case())
    expected = step.run(op)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = step.run(op)
    finally:
        torch.set_default_dtype(before)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_threads_share_the_work(op: str) -> None:
    """Above the length that uses several threads, with several jobs each."""
    step = make_step(Case(length=1500, ratio=3, head_dim=64, group=64, residual=64, top_k=32))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = step.run(op)
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(found, step.run(op), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def before_no_mans_land(x: Tensor) -> Tensor:
    """Return a copy at the end of a mapping that a protected page follows."""
    size = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    libc = ctypes.CDLL(None, use_errno=True)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    forbidden = 0
    assert libc.mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(mmap.PAGESIZE), forbidden) == 0
    copy = torch.frombuffer(memory, dtype=torch.uint8, offset=size - x.nbytes, count=x.nbytes)
    return copy.view(x.dtype).view(x.shape).copy_(x)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="protects a page as Linux does")
@pytest.mark.parametrize("bits", [1, 2, 4, 16])
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_nothing_past_a_full_tier_is_read(op: str, head_dim: int, bits: int) -> None:
    """The kernel reads whole vectors of codes; a read past the last one ends the process."""
    case = Case(length=256, residual=0, head_dim=head_dim, bits=bits)
    step = make_step(case)
    for name in LOW_BIT_TIER:
        kept = step.state[name][:-1]  # without the last page of the last row, which has no tokens
        step.state[name] = before_no_mans_land(kept.contiguous()) if kept.numel() else kept
    step.cursor[-1, -1] = 0
    expected, expected_scores = expected_of(make_step(case), op)
    out, scores = step.run(op)
    torch.testing.assert_close(out.double(), expected, **CLOSE)
    torch.testing.assert_close(scores.double(), expected_scores, **CLOSE)
