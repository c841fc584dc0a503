"""The order of codes in a record, against its formulas number by number."""

from __future__ import annotations

import pytest
import torch
from record_fixture import key_place, param_place, value_place

from specache_compile.kernels.codes.records import (
    fields_of,
    in_thread_order,
    order_of,
    param_order,
    read_levels,
    stored_dim,
    write_levels,
)

pytestmark = pytest.mark.pairwise

DIMS, WIDTHS = (16, 32, 64, 128, 256), (1, 2, 4)


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dim", DIMS)
def test_a_number_is_in_the_word_and_at_the_bit_of_its_formula(dim: int, bits: int, values: bool) -> None:
    place_of, per_word = value_place if values else key_place, 32 // bits
    order = order_of(dim, bits, values).tolist()
    assert sorted(order) == list(range(64 * dim))
    for place, number in enumerate(order):
        expected = place // per_word, place % per_word * bits
        assert place_of(number // dim, number % dim, dim, bits) == expected


@pytest.mark.parametrize(("head_dim", "stored"), [(1, 16), (16, 16), (17, 32), (80, 128), (96, 128), (128, 128)])
def test_a_head_is_stored_in_the_next_power_of_two(head_dim: int, stored: int) -> None:
    assert stored_dim(head_dim) == stored


@pytest.mark.parametrize("dim", DIMS)
def test_a_threads_parameters_are_adjacent(dim: int) -> None:
    for place, channel in enumerate(param_order(dim, 2).tolist()):
        assert place == param_place(channel, dim)


def test_the_middle_two_of_four_scales_change_places() -> None:
    assert in_thread_order(torch.arange(8)).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("bits", [*WIDTHS, 8])
@pytest.mark.parametrize(("start", "tokens"), [(0, 128), (32, 32), (64, 96), (96, 128)])
def test_tokens_are_written_where_they_belong_and_others_stay(start: int, tokens: int, bits: int, values: bool) -> None:
    dim, capacity, other = 32, 256, 4
    codes = torch.full((1, 2, capacity, dim * (bits + other) // 8), 255, dtype=torch.uint8)
    levels = torch.randint(0, 2**bits, (1, 2, tokens, dim), dtype=torch.uint8)
    write_levels(levels, start, codes, bits, values)
    found = read_levels(codes, dim, bits, values)
    assert torch.equal(found[:, :, start : start + tokens], levels)
    assert (found[:, :, :start] == 2**bits - 1).all()
    assert (found[:, :, start + tokens :] == 2**bits - 1).all()
    assert (fields_of(codes, dim, other, not values) == 15).all()
    records = codes.view(2, capacity // 64, -1)
    part = records[..., -64 * dim * bits // 8 :] if values else records[..., : 64 * dim * bits // 8]
    token, channel = start + 5, 9
    expected = int(levels[0, 1, 5, channel])
    if bits == 8:
        assert part[1, token // 64, token % 64 * dim + channel] == expected
    else:
        word, bit = (value_place if values else key_place)(token % 64, channel, dim, bits)
        words = part[1, token // 64].contiguous().view(torch.int32)
        assert int(words[word]) >> bit & 2**bits - 1 == expected
