"""Queued work runs in every order that its events allow, and no bit differs; what a fault allows beyond that is found.

On the simulated device alone: a real one orders its work itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from conftest import prompt, tiny_llama
from specache_compile.kernels import copy_stream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("SIMULATED_DEVICE" not in os.environ, reason="a real device orders its work itself"),
]

SCHEDULES = ["late", "early", "random:0", "random:1"]
# What is missing is not fetched: a fetch that came too late, or that a step did not wait for, shows in the logits.
NEVER = {
    "lowering": "eager", "group_size": 32, "residual_length": 32, "top_k": 8, "min_context": 0, "correct": "never"
}  # fmt: skip


def set_schedule(name: str) -> None:
    from simulated_device import driver

    driver.set_schedule(name)


@pytest.fixture(autouse=True)
def schedule() -> Iterator[None]:
    """Each test sets its own; the ones behind it run as they are started."""
    yield
    set_schedule(os.environ["SIMULATED_SCHEDULE"])


@torch.no_grad()
def logits(mode: str | None, schedule: str, length: int = 124, steps: int = 6) -> torch.Tensor:
    """Of a prefill and some decode steps with given tokens, in which the host runs ahead; read at the end."""
    set_schedule("eager")
    torch._dynamo.reset()
    model = tiny_llama().cuda()
    model.compile(backend="specache", options={**NEVER, "mode": mode})
    ids, tokens = prompt(length).cuda(), prompt(steps, seed=5).cuda()
    places = torch.arange(length, length + steps, device="cuda").view(steps, 1, 1)
    set_schedule(schedule)
    out = model(ids, use_cache=True)
    made: list[Any] = [out.logits[:, -1]]
    for step in range(steps):
        token = tokens[:, step : step + 1]
        out = model(token, past_key_values=out.past_key_values, position_ids=places[step], use_cache=True)
        made.append(out.logits[:, -1])
    told = torch.stack([each.cpu() for each in made])
    assert told.isfinite().all()
    return told


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_work_runs_behind_the_events_it_waits_for(schedule: str) -> None:
    set_schedule(schedule)
    other = torch.cuda.Stream()
    numbers = torch.arange(12, device="cuda").view(3, 4).float()
    products = numbers @ numbers.t()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        doubled = products * 2
        host = torch.empty(3, 3, pin_memory=True)
        host.copy_(doubled, non_blocking=True)
        done = other.record_event()
    torch.cuda.current_stream().wait_event(done)
    summed = doubled + 0
    done.synchronize()
    expected = numbers.cpu() @ numbers.cpu().t() * 2
    assert torch.equal(summed.cpu(), expected)
    assert torch.equal(host, expected)


def test_work_that_does_not_wait_is_seen() -> None:
    """The default stream first: what it reads of the other stream has not been written."""
    set_schedule("late")
    other, zeros = torch.cuda.Stream(), torch.zeros(3, device="cuda")
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        zeros.add_(1)
    assert (zeros + 0).tolist() == [0, 0, 0]
    other.synchronize()
    assert zeros.tolist() == [1, 1, 1]


@pytest.mark.parametrize("mode", [None, "reduce-overhead"], ids=["as it is", "recorded"])
def test_a_decode_is_the_same_under_every_schedule(mode: str | None) -> None:
    expected = logits(mode, "eager")
    for schedule in SCHEDULES:
        assert torch.equal(logits(mode, schedule), expected), schedule


def test_a_wait_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(None, "late")
    monkeypatch.setattr(copy_stream, "wait", lambda *given: None)
    assert torch.equal(logits(None, "eager"), expected)
    assert not torch.equal(logits(None, "late"), expected)


def test_a_fetch_that_does_not_wait_for_its_choice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy stream first: it gathers by a choice that nobody has written, from where no memory is."""
    logits(None, "early")
    wait_stream = torch.cuda.Stream.wait_stream

    def without_the_copy_streams(self: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        if self != copy_stream.stream_of(torch.device("cuda", 0)):
            wait_stream(self, other)

    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", without_the_copy_streams)
    with pytest.raises(torch.AcceleratorError, match="unspecified launch failure"):
        logits(None, "early")
