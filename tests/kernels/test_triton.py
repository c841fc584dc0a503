"""Triton's kernels beyond their ops' definitions, which `test_attention.py` and `test_tiers.py` compare."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from decode_step import Case, expected_of, make_step
from implementations import GPU, Ops, Way
from kept_fixture import bases_of
from torch import Tensor

pytest.importorskip("triton")

from specache_compile.kernels.decode import triton_decode, triton_exact, triton_scored
from specache_compile.kernels.movement import copy_stream, triton_copy, triton_select_logits
from specache_compile.kernels.movement import tier_ops as tiers
from specache_compile.kernels.movement import triton_select as select
from specache_compile.kernels.state import center, triton_center

BATCH = 2
TRITON, DEFINITION = Ops("triton"), Ops("definition")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_fetched_tokens_have_no_low_bit_weight_for_any_logit(dtype: torch.dtype) -> None:
    """The first base of row 0 is 60 above all logits, as for a tile whose fetched token has most of the weight."""
    case = Case(dtype=dtype, value_bits=1, trellis=True, eight=True, rotate=True, head_dim=128)
    new, slots, read = make_step(case).operands(GPU)
    logits, base, _ = TRITON.score_low_bit(*new, *read)
    expected = TRITON.attend_scored(*new, logits, base, slots[1], *slots, *read)
    bases_of(logits, base)[0, :, 0, :, :2] += 60
    logits[0, :, 0, :, :4] -= 60
    found = TRITON.attend_scored(*new, logits, base, slots[1], *slots, *read)
    # Half precision stores a logit 60 below its base with an error of a sixteenth.
    torch.testing.assert_close(found, expected, atol=1e-2 if dtype == torch.float16 else 1e-5, rtol=0)


def test_pairs_that_come_late_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The low-bit values use the chosen tokens; slots and their index are undefined until the copies end."""
    new, (slots, slot_index), read = make_step(Case(rotate=True, bits=1, dtype=torch.float16)).operands(GPU)
    logits, base, _ = TRITON.score_low_bit(*new, *read)
    chosen, right = slot_index.flip(-1).clone(), (slots.clone(), slot_index.clone())
    expected = TRITON.attend_scored(*new, logits, base, chosen, slots, slot_index, *read)
    slots.fill_(float("nan"))
    slot_index.copy_(slot_index.roll(1, -1) + 1)

    def arrive(*given: Tensor) -> None:
        for tensor, pairs in zip((slots, slot_index), right, strict=True):
            tensor.copy_(pairs)

    monkeypatch.setattr(triton_scored, "wait_for_correction", arrive)
    found = TRITON.attend_scored(*new, logits, base, chosen, slots, slot_index, *read)
    assert torch.equal(found, expected)
    assert found.isfinite().all()


@pytest.mark.parametrize("in_halves", [False, True])
def test_a_center_of_thousands_leaves_tokens_their_order(in_halves: bool) -> None:
    """If all low-bit tokens' logits share an offset of 3,000, scores still rank by their differences."""
    step = make_step(Case(center=True, dtype=torch.float16, head_dim=64))
    step.state["center"][:, :, :2] *= 0.02
    step.state["center"][:, :, 0, -1] += 6000.0  # a channel that RoPE does not rotate
    step.q[..., -1] = 4.0
    new, _, read = step.operands(torch.device("cpu"))
    assert DEFINITION.score_low_bit(*new, *read)[0][0, 0, 0, 5] > 2000
    ours, expected = (step.run(Way(ops, in_halves)) for ops in (TRITON, DEFINITION))
    assert expected[1].max() < 0.9
    torch.testing.assert_close(ours, expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("queries", "lanes", "d"), [(4, 2, 64), (3, 1, 80), (1, 1, 32)], ids=str)
def test_a_share_of_the_center_is_that_of_double_precision(
    dtype: torch.dtype, queries: int, lanes: int, d: int
) -> None:
    """Within a few units of float32's last place, for several groups at once, and none after the low-bit tier."""
    heads, group, capacity, low_bit = 2, 32, 2048, 1504
    q = (20 * torch.randn(BATCH, lanes, heads * queries, d)).to(GPU, dtype).transpose(1, 2)
    theta, partner = center.partners(0.8 ** torch.arange(d // 2 - 4, device=GPU), d)
    beta = 100 * torch.randn(BATCH, heads, d, device=GPU)
    rows = [beta, center.quarter_turn(beta, partner), theta.expand_as(beta), partner.expand_as(beta)]
    cursor = torch.tensor([[low_bit + 40, low_bit, low_bit]], device=GPU).repeat(BATCH, 1)
    shares = triton_center.share_of_center(q, torch.stack(rows, 2).contiguous(), cursor, capacity, group, d**-0.5)

    token = torch.arange(low_bit, device=GPU)
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
    q = torch.randn(2, 2 * heads, 1, d, device=GPU)
    stored = torch.randn(2, heads, 3, d, device=GPU)
    stored[:, :, 2] = 3 * 0.8 ** torch.arange(d, device=GPU)
    stored[0, :, 1:] = 0
    low_bit = torch.tensor([1920, 640])
    cursor = torch.stack([low_bit + 40, low_bit, low_bit], 1).to(GPU)
    shares = triton_center.share_of_center(q, stored, cursor, capacity, group, d**-0.5)
    expected = center.share_of_center(q.double().unflatten(1, (heads, 2)) * d**-0.5, stored.double(), group, capacity)
    for row, stop in enumerate((low_bit // group).tolist()):
        torch.testing.assert_close(
            shares[row, ..., :stop].double(), expected[row].flatten(0, 1)[..., :stop], atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("in_halves", [False, True])
@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
@pytest.mark.pairwise
def test_decode_attention_is_split_over_programs_and_merged(
    rotate: bool, in_halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splits of one head's tiers; empty splits add nothing."""
    monkeypatch.setattr(triton_decode, "best_splits", lambda rows, tiles, slots: 9)
    monkeypatch.setattr(triton_exact, "exact_splits", lambda rows, blocks, device, programs: 3)
    step = make_step(Case(heads=1, batch=1, length=500, rotate=rotate, head_dim=64))
    step.cursor = torch.cat([step.cursor, torch.zeros(1, 2, dtype=torch.int64)], 1)  # room for 1,024 tokens
    out, scores = step.run(Way(TRITON, in_halves))
    for found, expected in zip((out, scores), expected_of(step, in_halves), strict=True):
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


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


def chosen(scores: Tensor, k: int) -> list[list[int]]:
    selected = torch.full((*scores.shape[:2], k), 7, dtype=torch.int32, device=GPU)
    select.select_topk(scores.to(GPU), selected)
    return [[token for token in row if token >= 0] for row in selected.flatten(0, 1).tolist()]


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
    if GPU.type == "cpu":
        monkeypatch.setattr(copy_stream, "stream_of", lambda device: mock.MagicMock())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: mock.MagicMock())
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


def test_a_correction_copies_the_low_bit_tokens_that_lane_0_selects(streams: None) -> None:
    step = make_step(Case(length=703))  # in this step a group of candidates leaves the window
    new, slots, read = step.operands(GPU)
    logits, base, scores = TRITON.score_low_bit(*new, *read)
    host = torch.randn(len(step.state["codes"]), 2, 256, 2, 16)
    host = host.pin_memory() if GPU.type == "cuda" else host
    assert scores[0].topk(24).indices.max() >= step.case.low_bit(703), "some candidates are not in the low-bit tier yet"

    def corrected(correct: Any) -> tuple[Tensor, ...]:
        pairs, index = (x.clone() for x in slots)
        moved = torch.zeros(1, dtype=torch.int64, device=GPU)
        chosen = correct(scores, new[5], host, pairs, index, moved, new[0], logits, base, None)
        copy_stream.wait_for_correction(pairs)
        assert torch.equal(chosen.sort(-1).values, index.sort(-1).values)
        order = index.sort(-1).indices
        where = order[..., None, None].expand(-1, -1, -1, 2, 16)
        return index.gather(-1, order), pairs.gather(2, where), moved

    ours, expected = corrected(copy_stream.correct), corrected(tiers.correct)
    assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))
    assert expected[2] > 0


def test_a_corrections_gather_has_a_program_for_each_head(monkeypatch: pytest.MonkeyPatch, streams: None) -> None:
    grids = []
    monkeypatch.setattr(triton_copy, "gather", lambda *given, programs: grids.append(programs))
    monkeypatch.setattr(triton_select_logits, "select", lambda *given: None)
    index, q = torch.zeros(BATCH, 24, 8, dtype=torch.int32, device=GPU), torch.zeros(BATCH, 24, 1, 16, device=GPU)
    copy_stream.correct(q, index, index, index, index, index, q, q, q.flatten(), None)
    assert grids == [BATCH * 24]


def compiled(*given: str) -> str:
    """Return the output of compiling the kernels without a GPU, in a separate process, since a process that interprets
    kernels cannot compile them."""
    script = Path(__file__).parents[2] / "tools" / "compile_kernels.py"
    done = subprocess.run([sys.executable, str(script), *given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_attention_compiles_where_a_key_has_the_fewest_bytes() -> None:
    printed = compiled("--only=fp32, 1 bit, d 16")
    assert "score_keys" in printed
    assert "sum_values" in printed
    assert "store_groups" in printed


def test_the_largest_group_fits_the_smallest_shared_memory() -> None:
    assert "sm_89" in compiled("--for=89", "--only=store_groups fp32, 4 bits, g 128, d 256")


def test_the_keys_loop_has_no_shared_memory_and_few_instructions() -> None:
    """Another kWidth of Triton would send the operands of the products through shared memory."""
    printed = compiled("--for=90", "--only=score_keys the default, d 128")
    (line,) = [line for line in printed.splitlines() if line.startswith("sm_90 score_keys")]
    assert " 0 B shared" in line
    assert float(line.split(" instructions a number")[0].split()[-1]) <= 1.5


@pytest.mark.slow
def test_every_kernel_compiles_for_the_gpus_that_are_supported() -> None:
    """Both GPU architectures; each kernel except the smallest has several shapes."""
    printed = compiled()
    assert printed.count("sm_90") + printed.count("sm_80") > 50
