"""A row's sink tokens against a plain Python model."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from specache_compile.kernels.state.sinks import EMPTY, find_sinks

MOST, GROUP, RESIDUAL = 5, 8, 4


def low_bit(length: int) -> int:
    return GROUP * max(0, (length - RESIDUAL) // GROUP)


def first_there(there: list[bool], stop: int) -> list[int]:
    found = [token for token in range(stop) if there[token]][:MOST]
    return found + [EMPTY] * (MOST - len(found))


def found_step_by_step(there: Tensor, sizes: list[int]) -> Tensor:
    sink_index, length = torch.full((len(there), 1, MOST), EMPTY, dtype=torch.int32), 0
    for size in sizes:
        find_sinks(sink_index, there, low_bit(length), length + size)
        length += size
        assert sink_index[:, 0].tolist() == [first_there(row, length) for row in there.tolist()]
    return sink_index


@pytest.mark.parametrize("seed", range(20))
def test_sinks_are_the_first_real_tokens_in_any_steps(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.choice([1, 1, 2, 7, 20]) for _ in range(9)]
    padding = torch.tensor([0, 3, 17, 30, 1000]).view(-1, 1)
    there = (torch.arange(sum(sizes)) >= padding) & (torch.rand(5, sum(sizes)) < chance.choice([0.3, 1.0]))
    found_step_by_step(there, sizes)


def test_without_padding_they_are_the_first_tokens() -> None:
    sink_index = torch.full((2, 1, MOST), EMPTY, dtype=torch.int32)
    find_sinks(sink_index, None, 0, 3)
    assert sink_index[:, 0].tolist() == [[0, 1, 2, EMPTY, EMPTY]] * 2
    find_sinks(sink_index, None, 0, 300)
    assert sink_index[:, 0].tolist() == [[0, 1, 2, 3, 4]] * 2


def test_sinks_in_the_low_bit_tier_stay_under_any_later_mask() -> None:
    """Their pairs are already stored; pairs of other tokens that have left the window are not."""
    sink_index = found_step_by_step(torch.ones(1, 13, dtype=torch.bool), [13])  # of which 8 are in the low-bit tier
    hidden = torch.arange(40).unsqueeze(0) >= 2
    find_sinks(sink_index, hidden, 8, 40)
    assert sink_index[0, 0].tolist() == [0, 1, 2, 3, 4]
    fewer = torch.tensor([[[0, 1, EMPTY, EMPTY, EMPTY]]], dtype=torch.int32)
    find_sinks(fewer, None, 8, 40)
    assert fewer[0, 0].tolist() == [0, 1, 8, 9, 10]
