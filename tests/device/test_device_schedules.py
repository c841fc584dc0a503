"""Queued work runs in every order that its events allow, and no bit differs.

On the simulated device alone: a real one orders its work itself.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import pytest
from one_run import Result, differences, run, undisturbed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.one_process,
    pytest.mark.skipif("SIMULATED_DEVICE" not in os.environ, reason="a real device orders its work itself"),
]

SCHEDULES = ["late", "early", "random:0", "random:1"]


@pytest.fixture(autouse=True)
def eager_again() -> Iterator[None]:
    """Restore the eager schedule after each test."""
    with undisturbed():
        yield


RUNS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "recorded": {"mode": "reduce-overhead"},
    "five layers": {"layers": 5, "mode": "reduce-overhead", "steps": 3},
    "corrected": {"setting": "best", "speculate": True, "steps": 3},
    "corrected alone": {"setting": "best", "mode": "reduce-overhead", "steps": 4},
    "one lane": {"speculate": False, "steps": 3},
    "a second turn": {"more": 40, "steps": 2},
}


# A recorded run under every kind of order, the others under one of them each.
QUICK = (
    *(f"recorded-{schedule}" for schedule in SCHEDULES), "as it is-late", "five layers-random:2",
    "corrected-random:1", "corrected alone-late", "corrected alone-early", "one lane-late", "a second turn-early",
)  # fmt: skip


@pytest.mark.parametrize("schedule", [*SCHEDULES, *(f"random:{seed}" for seed in range(2, 12))])
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.quick_for(*QUICK)
def test_a_run_is_the_same_under_every_schedule(name: str, schedule: str) -> None:
    """Logits and all tiers, bit for bit."""
    settings = RUNS[name]
    assert not differences(expected(name), run(schedule, **settings)), f"{name} under {schedule}"


def test_a_replay_reads_no_value_captured_from_the_host() -> None:
    """Lengths, tokens and tiers differ in each replay; results equal those of uncaptured steps."""
    assert not differences(expected("as it is"), expected("recorded"))


@functools.cache
def expected(name: str) -> Result:
    return run("eager", **RUNS[name])
