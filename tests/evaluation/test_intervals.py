"""Intervals against Student's own table, and Wilson's against published ones."""

from __future__ import annotations

import math

import pytest

from specache_compile.evaluation.intervals import interval, student, wilson

# Degrees of freedom, and the 97.5 % point (any table of the distribution).
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 7: 2.365, 10: 2.228, 15: 2.131, 30: 2.042, 60: 2.000}


@pytest.mark.parametrize("degrees", TABLE)
def test_few_values_have_a_wider_interval(degrees: int) -> None:
    assert student(degrees) == pytest.approx(TABLE[degrees], abs=0.01)


def test_an_interval_is_of_the_mean() -> None:
    assert interval([1.0, 3.0]) == pytest.approx(12.706 * math.sqrt(2) / math.sqrt(2))
    assert interval([0.0, -1.0, 0.0, -1.0]) == pytest.approx(3.182 * math.sqrt(1 / 3) / 2, rel=1e-3)


@pytest.mark.parametrize("values", [[1.0], [1.0, math.nan]])
def test_one_value_has_none(values: list[float]) -> None:
    assert math.isnan(interval(values))


# Shares found, and the ends in percent (Newcombe, Statistics in Medicine 17, 1998, table I, method 3).
SHARES = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605), (0, 20): (0.0, 0.1611), (1, 29): (0.0061, 0.1718),
          (11, 11): (0.7412, 1.0)}  # fmt: skip


@pytest.mark.parametrize("share", SHARES)
def test_the_interval_of_a_share_is_wilsons(share: tuple[int, int]) -> None:
    assert wilson(*share) == pytest.approx(SHARES[share], abs=6e-5)
