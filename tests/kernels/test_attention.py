"""Attention by definition, C++ and Triton, against a float64 reference over the cache in position order."""

from __future__ import annotations

import ctypes
import importlib
import math
import mmap
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_step import Case, Step, expected_of, make_mask, make_step, output, reference
from implementations import GPU, KINDS, WAYS, Ops, Way
from torch import Tensor

import pairwise
from held_tiers import adjacent, cursor_over, in_pages
from specache_compile.kernels.attention.attention_ops import BLOCK
from specache_compile.kernels.state.page_table import LOW_BIT_TIER

pytestmark = pytest.mark.pairwise

# Error of float32 sums of a few hundred terms of size 1; the float64 reference has no such error.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
# Triton multiplies in the inputs' dtype.
TOLERANCE = {
    torch.float32: CLOSE,
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
    torch.bfloat16: {"rtol": 0.03, "atol": 0.03},
}
ON_CPU, ON_GPU = (tuple(way for way in WAYS if (way.ops.kind == "triton") == triton) for triton in (False, True))


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


MASKS = (
    "padding", "padding each lane", "random", "position bias", "longer than the cache", "additive float32",
    "additive bfloat16", "additive float16",
)  # fmt: skip

# Lengths around W = R + g: an empty low-bit tier, the step that fills a group, a ring that has wrapped, two pages.
# With R = 0 the new token is in the low-bit tier, but no candidate, since its pair has not reached the host. Sinks are
# in the low-bit tier, in the window, and in the group that leaves the window in this step.
AXES: dict[str, list[Any]] = {
    "length": [1, 20, 31, 40, 63, 64, 65, 70, 96, 127, 128, 150, 200, 350], "lanes": [1, 2, 11],
    # 8: fewer channels than a product's smallest side; 72: an odd number of bytes a plane; 80, 96: planes straddle.
    "heads": [1, 3], "ratio": [1, 2, 7, 12], "head_dim": [8, 16, 64, 72, 80, 96, 128, 256],
    "bits": [1, 2, 4, 8, 16], "value_bits": [None, 1, 2, 8], "rotate": [False, True], "trellis": [False, True],
    # A trellis of keys subtracts a stepped center, or one of waves.
    "key_trellis": [False, True], "eight": [False, True], "center": [False, True], "group": [32, 64, 128],
    "residual": [0, 20, 32, 45], "top_k": [0, 24, 80], "filled": [0, 1, 20, 80], "sink_tokens": [0, 1, 5, 40],
    "mask": ["none", *MASKS, "nothing is seen"], "softcap": [None, 2.0, 30.0], "sinks": [False, True],
}  # fmt: skip
# Around a block of the definition.
LONG = [Case(length=BLOCK + 40 + more, heads=1, mask=mask) for more in (-32, 0, 32) for mask in ("padding", MASKS[5])]


def random_cases(count: int) -> list[Case]:
    chance = random.Random(0)
    cases = (Case(**{name: chance.choice(values) for name, values in AXES.items()}) for _ in range(count))
    return [case for case in cases if case.is_possible]


SAMPLE = random_cases(40_000)
CASES = [Case(), *(SAMPLE[place] for place in pairwise.chosen([{"case": case} for case in SAMPLE]))]
IN_TRELLIS = Case(bits=1, trellis=True, key_trellis=True, eight=True, rotate=True, sink_tokens=4, head_dim=128)
HALF = [Case(dtype=torch.float16), replace(IN_TRELLIS, dtype=torch.float16, mask="padding")]


# A split's tokens may end before others begin.
TRITON = [*CASES, *HALF, Case(heads=1, length=1000), replace(IN_TRELLIS, heads=1, length=1000, rotate=False)]


def check(way: Way, step: Step, close: dict[str, float], close_scores: dict[str, float] | None = None) -> None:
    out, scores = step.run(way)
    expected, expected_scores = expected_of(step, way.in_halves)
    assert (out.dtype, scores.dtype) == (step.case.dtype, torch.float32)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), expected, **close)
    torch.testing.assert_close(scores.double(), expected_scores, **(close_scores or close))
    assert torch.equal(scores == -1, expected_scores == -1)


@pytest.mark.parametrize("way", ON_CPU, ids=str)
@pytest.mark.parametrize("case", [*CASES, *LONG], ids=str)
def test_output_and_scores_are_the_references(way: Way, case: Case) -> None:
    check(way, make_step(case), CLOSE)


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("way", ON_GPU, ids=str)
@pytest.mark.parametrize("case", TRITON, ids=str)
def test_tritons_output_and_scores_are_the_references(way: Way, case: Case) -> None:
    check(way, make_step(case), TOLERANCE[case.dtype])


@pytest.fixture
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the interpreter the simulated device's arithmetic in bfloat16."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "device" / "hooks")
    shim = importlib.import_module("simulated_device.bfloat16")
    for name in ("binary_op", "unary_op", "ternary_op", "create_fma", "cast_impl", "create_fp_to_fp", "create_dot"):
        monkeypatch.setattr(shim.InterpreterBuilder, name, getattr(shim.InterpreterBuilder, name))
    shim.install()


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.pairwise(1)
@pytest.mark.parametrize("way", ON_GPU, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        replace(IN_TRELLIS, dtype=torch.bfloat16),
        replace(IN_TRELLIS, dtype=torch.bfloat16, eight=False, key_trellis=False, head_dim=64, group=64),
        *(Case(dtype=torch.bfloat16, bits=bits, eight=bits < 4, head_dim=64) for bits in (1, 2, 4)),
        *(Case(dtype=torch.bfloat16, bits=bits) for bits in (8, 16)),
    ],
    ids=str,
)
def test_triton_in_bfloat16(way: Way, case: Case) -> None:
    check(way, make_step(case), TOLERANCE[torch.bfloat16])


def test_a_slot_of_a_token_still_in_the_recent_tier_is_not_read(way: Way) -> None:
    """A pre-decode may select tokens that leave the window only in the next decode step."""
    step = make_step(Case(length=200, filled=20))
    out, scores = step.run(way)
    empty = step.state["slot_index"] == -1
    step.state["slot_index"][empty] = step.case.low_bit(200) + 3
    again, scores_again = step.run(way)
    assert torch.equal(out, again)
    assert torch.equal(scores, scores_again)


@pytest.mark.parametrize(("size", "sink"), [(3e3, 0.0), (1.0, 200.0)], ids=["logits", "sinks"])
def test_large_numbers_do_not_overflow(way: Way, size: float, sink: float) -> None:
    step = make_step(Case(filled=4, sinks=True))
    step.q *= size
    step.sinks += sink
    # Logits of a few thousand have a float32 error of about 1e-3, which is the weights' relative error.
    check(way, step, {"rtol": 2e-2, "atol": 2e-2} if size > 1 else CLOSE)


@pytest.mark.parametrize("way", ON_CPU, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [1, 2, 16])
def test_half_precision_inputs_cost_one_rounding_of_the_output(way: Way, bits: int, dtype: torch.dtype) -> None:
    """Sums are float32, and the reference has the same rounded inputs, so half an ulp of the output's dtype remains."""
    step = make_step(Case(dtype=dtype, bits=bits, mask="padding", sinks=True, head_dim=64))
    check(way, step, {"rtol": torch.finfo(dtype).eps / 2 + 1e-4, "atol": 2e-5}, CLOSE)


@pytest.mark.parametrize("way", ON_CPU, ids=str)
def test_a_mask_shorter_than_the_cache_is_refused(way: Way) -> None:
    step = make_step(Case())
    step.mask = torch.ones(2, 1, 1, 200, dtype=torch.bool)
    with pytest.raises(ValueError, match="covers 200 tokens, but the cache and the new ones are 201"):
        step.run(way)


# Skipped values


@pytest.mark.parametrize(
    "bits", [{}, {"bits": 1, "trellis": True}, {"bits": 4, "value_bits": 8}, {"bits": 16}], ids=str
)
def test_records_of_small_weights_are_left_out(way: Way, bits: dict[str, Any]) -> None:
    """The error is within its bound, and scores do not change. Three records of ten are hidden but for a trace."""
    case = Case(**{**bits, "length": 700, "heads": 1, "group": 64, "top_k": 8, "filled": 8})
    step, skip_below = make_step(case), 1e-3
    far = torch.arange(case.length + 1) // 64 % 3 == 1
    step.mask = -6.0 * far.float().expand(2, 1, 1, -1)
    step.mask[0, :, :, 64 + 7] = 0.0  # one weight keeps its record
    expected, _ = expected_of(step, way.in_halves, skip_below)
    whole, scores = expected_of(step, way.in_halves)
    out, found_scores = step.run(way, skip_below)
    torch.testing.assert_close(out.double(), expected, **CLOSE)
    torch.testing.assert_close(found_scores.double(), scores, **CLOSE)
    error = (out.double() - whole).abs().max()
    assert 1e-4 < error < 2 * case.low_bit(case.length) * skip_below * step.values.abs().max()


@pytest.mark.parametrize("way", ON_CPU, ids=str)
def test_what_is_left_is_normalised_however_little_it_is(way: Way) -> None:
    """The new tokens alone are left, with weights that float32 cannot tell from 0 beside the others'."""
    step = make_step(Case(length=192, residual=0, top_k=8, filled=0, lanes=1))
    step.mask = torch.zeros(2, 1, 1, 193)
    step.mask[..., -1] = -1e4
    out, _ = step.run(way, 0.9)
    torch.testing.assert_close(out, step.v.repeat_interleave(2, 1), rtol=1e-5, atol=1e-5)


# Chunked prefill: exact attention over the host tier


def extend(length: int = 100, tokens: int = 12, mask: str = "none", **changes: Any) -> Case:
    """Return the shapes of a chunked prefill of `tokens` new tokens after `length` cached ones."""
    return Case(length=length, lanes=tokens, mask=mask, **changes)


EXTENDS = (
    *(extend(length, tokens) for length in (0, 1, 100) for tokens in (1, 2, 37)),
    *(extend(BLOCK * blocks + more, 9, mask) for blocks, more in ((1, -1), (1, 0), (1, 1), (2, 5))
      for mask in ("none", "padding", "additive float32")),
    *(extend(mask=mask, batch=3) for mask in MASKS if mask not in ("padding each lane", "longer than the cache")),
    *(extend(70, 5, ratio=ratio, head_dim=head_dim) for ratio in (1, 2, 4) for head_dim in (16, 64, 80, 96)),
    *(extend(70, 5, mask, softcap=softcap, sinks=sinks) for mask in ("none", "padding")
      for softcap, sinks in ((None, True), (2.0, False), (2.0, True))),
    *(extend(mask="padding", sinks=True, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)),
    # Left padding causes rows that see nothing: a chunk's padded queries see no key.
    *(extend(length, 4, "nothing is seen") for length in (0, 100)),
)  # fmt: skip


@pytest.fixture(params=KINDS)
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ops:
    """The ops of a kind; Triton reads the host tier in several blocks, of which the last is partial."""
    if request.param == "triton":
        monkeypatch.setattr("specache_compile.kernels.attention.triton_extend.HOST_BLOCK", 48)
    return Ops(request.param)


def extended(ops: Ops, q: Tensor, *rest: Tensor | None, softcap: float | None = None) -> Tensor:
    given = (None if x is None else x.to(ops.device) for x in (q, *rest))
    out = ops.extend_attention(*given, q.shape[-1] ** -0.5, softcap)
    assert out.dtype == q.dtype
    assert out.is_contiguous(), "its fake is contiguous"
    return out.cpu()


@pytest.mark.parametrize("case", EXTENDS, ids=str)
def test_extend_is_the_references(ops: Ops, case: Case) -> None:
    length, tokens, batch, heads, ratio = case.length, case.lanes, case.batch, case.heads, case.ratio
    head_dim, softcap, dtype = case.head_dim, case.softcap, case.dtype
    if ops.kind == "triton" and GPU.type == "cpu" and (dtype == torch.bfloat16 or length > 500):
        pytest.skip("the interpreter is slow, and multiplies bfloat16 as integers")
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    host = torch.full((batch, heads, 256 * (length // 256 + 1), 2, head_dim), math.nan, dtype=dtype)
    host[:, :, :length] = normal(batch, heads, length, 2, head_dim)
    # Of any strides.
    q, k, v = (normal(batch, n, head_dim, tokens).mT for n in (heads * ratio, heads, heads))
    sink = normal(heads * ratio) if case.sinks else None
    causal = torch.ones(tokens, length + tokens, dtype=torch.bool).tril(length)
    given = make_mask(case.mask, batch, heads * ratio, tokens, length, tokens, generator)
    if given is not None:  # Hugging Face's masks are causal themselves
        causal_too = given & causal if given.dtype == torch.bool else given.masked_fill(~causal, -math.inf)
        given = causal_too[..., : length + tokens]
    table = 1 + torch.randperm(host.shape[2] // 256 * batch, generator=generator).view(batch, -1)
    keys, values = torch.cat([host[:, :, :length, 0], k], 2), torch.cat([host[:, :, :length, 1], v], 2)
    expected = output(reference(q, keys, given, causal, sink, softcap), values)
    out = extended(ops, q, k, v, given, sink, cursor_over(table, length), in_pages(host, table).pages, softcap=softcap)
    # torch's kernel rounds weights too.
    eps, roundings = torch.finfo(dtype).eps, 0.5 if ops.kind == "definition" else 2
    rounding = {"rtol": roundings * eps + 1e-4, "atol": 2e-5 + (roundings > 1) * eps}
    torch.testing.assert_close(out.double(), expected, **rounding)


@pytest.mark.parametrize("padding", [3, 5, 9], ids=["a part of the chunk", "the whole chunk", "more than the chunk"])
def test_new_tokens_of_padding_attend_to_nothing(ops: Ops, padding: int) -> None:
    """Next to a row with cached tokens and without padding, which may hold any numbers."""
    q, k, v = torch.randn(2, 2, 5, 16), torch.randn(2, 1, 5, 16), torch.randn(2, 1, 5, 16)
    host, table = torch.full((2, 1, 256, 2, 16), math.nan), adjacent(2, 256)
    host[1, :, :100], k[0, :, :padding], v[0, :, :padding] = torch.randn(100, 2, 16), math.nan, math.nan
    cursor = torch.cat([cursor_over(table[:1], -padding), cursor_over(table[1:], 100)])
    out = extended(ops, q, k, v, None, None, cursor, host)
    keys, values = (torch.cat([host[1:, :, :100, part], x[1:]], 2) for part, x in enumerate((k, v)))
    expected = output(reference(q[1:], keys, None, torch.ones(5, 105).bool().tril(100), None, None), values)
    torch.testing.assert_close(out[1:].double(), expected, **CLOSE)
    assert not out[0, :, :padding].any()
    for row in range(padding, 5):
        weights = (q[0, :, row] @ k[0, 0, padding : row + 1].T * 0.25).softmax(-1)
        torch.testing.assert_close(out[0, :, row], weights @ v[0, 0, padding : row + 1])


@pytest.mark.parametrize("length", [0, 100, 3 * BLOCK])
def test_a_row_of_the_lowest_number_is_a_mean_of_the_values(ops: Ops, length: int) -> None:
    """An additive mask of the lowest finite number hides nothing from a softmax if it is everywhere."""
    length = min(length, 300) if ops.kind == "triton" else length
    q, k, v = torch.randn(1, 2, 4, 16), torch.randn(1, 1, 4, 16), 1 + 0.1 * torch.rand(1, 1, 4, 16)
    host = 1 + 0.1 * torch.rand(length // 256 + 1, 1, 256, 2, 16)
    mask = torch.full((1, 1, 4, length + 4), torch.finfo(torch.float32).min)
    out = extended(ops, q, k, v, mask, None, cursor_over(torch.arange(len(host))[None], length), host)
    assert out.min() >= 1 - 1e-5
    assert out.max() <= 1.1 + 1e-5


def test_extend_refuses_a_mask_that_covers_too_few_tokens(ops: Ops) -> None:
    q, host = torch.randn(1, 2, 3, 16), torch.zeros(1, 1, 256, 2, 16)
    mask = torch.ones(1, 1, 1, 101, dtype=torch.bool)
    with pytest.raises(ValueError, match="covers 101 tokens, but the cache and the new ones are 103"):
        extended(ops, q, q[:, :1], q[:, :1], mask, None, cursor_over(adjacent(1, 256), 100), host)


def test_triton_extends_over_codes_as_over_decoded_pairs() -> None:
    codes = torch.randint(0, 120, (2, 2, 256, 2, 16), dtype=torch.uint8)
    q, (k, v) = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 2, 1, 16)
    given = (q, k, v, None, None, cursor_over(adjacent(2, 256), 40))
    pairs = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(extended(Ops("triton"), *given, codes), extended(Ops("triton"), *given, pairs))


@pytest.mark.parametrize("way", ON_CPU, ids=str)
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_another_default_dtype_changes_nothing(way: Way, default: torch.dtype) -> None:
    step = make_step(Case())
    expected = step.run(way)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = step.run(way)
    finally:
        torch.set_default_dtype(before)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("way", ON_CPU, ids=str)
def test_threads_share_the_work(way: Way) -> None:
    """Above the length that uses several threads, with several jobs each."""
    step = make_step(Case(length=1500, ratio=3, head_dim=64, group=64, residual=64, top_k=32))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = step.run(way)
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(found, step.run(way), strict=True):
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
def test_nothing_past_a_full_tier_is_read(way: Way, head_dim: int, bits: int) -> None:
    """The kernel reads whole vectors of codes; a read past the last one ends the process."""
    step = make_step(Case(length=256, residual=0, head_dim=head_dim, bits=bits))
    for name in LOW_BIT_TIER:
        kept = step.state[name][:-1]  # without the last page of the last row, which has no tokens
        step.state[name] = before_no_mans_land(kept.contiguous()) if kept.numel() else kept
    step.cursor[-1, -1] = 0
    check(way, step, CLOSE)
