"""One-line faults, planted in the product: each is detected under at least one schedule.

Without the fault, the same run equals a run in which all work runs immediately. This needs the simulated device, since
a real device shows a fault in the order of streams only once in many runs.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import one_run
import pytest
import torch

import specache_compile as sc
from conftest import prompt
from specache_compile.compat import cache_of
from specache_compile.kernels.memory import host_memory
from specache_compile.kernels.movement import copy_stream
from specache_compile.lowering import cuda_graphs
from specache_compile.passes import prefetch
from specache_compile.runtime.session import session_of

pytest.importorskip("triton", reason="Triton is for Linux alone")

from specache_compile.kernels.attention import triton_extend
from specache_compile.kernels.decode import triton_scored

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.one_process,
    pytest.mark.skipif("SIMULATED_DEVICE" not in os.environ, reason="a real device orders its work itself"),
]

CORRECTED = {"setting": "best"}


@dataclass(frozen=True)
class Fault:
    """Replaces `line` of a function by `instead`; runs with `settings` detect it under `schedule`.
    in_the_graph: the function is a pass, so the model is compiled again for the faulty run."""

    name: str
    function: Callable[..., Any]
    line: str
    instead: str
    schedule: str
    settings: dict[str, Any] = field(default_factory=dict)
    in_the_graph: bool = False


FAULTS = [
    Fault(
        "a wait left out", copy_stream.wait,
        "torch.cuda.current_stream(slots.device).wait_event(fetch)", "pass", "late",
    ),
    Fault(
        "slots rewritten while they are read", copy_stream.prefetch,
        "copy.wait_stream(torch.cuda.current_stream(slots.device))", "pass", "early",
    ),
    Fault(
        "a correction not waited for", copy_stream.wait_for_correction,
        "join(slots.device)", "pass", "late", CORRECTED,
    ),
    Fault(
        "a correction on another stream", copy_stream.correct,
        "copy = stream_of(slots.device)", "copy = torch.cuda.Stream(slots.device)", "late", CORRECTED,
    ),
    Fault(
        "slots corrected while they are read", copy_stream.correct,
        "copy.wait_stream(torch.cuda.current_stream(slots.device))", "pass", "early", CORRECTED,
    ),
    Fault(
        "the values of what the slots held left out", triton_scored.attend_scored,
        "hide(logits, chosen)", "hide(logits, slot_index)", "late", CORRECTED,
    ),
    Fault(
        "staging copied before it is written", copy_stream.Staging.send, "copy.wait_stream(main)", "pass", "early",
    ),
    Fault(
        "staging reused", copy_stream.Staging.send, "main.wait_event(copied)", "pass", "late",
        {"layers": 3, "steps": 0},
    ),
    Fault(
        "a block of the host tier attended to before it is there", copy_stream.host_blocks,
        "main.wait_event(loaded)", "pass", "late", {"more": 30},
    ),
    Fault(
        "a block of the host tier overwritten while it is attended to", copy_stream.host_blocks,
        "copy.wait_stream(main)", "pass", "early", {"more": 30},
    ),
    Fault(
        "selected chosen again before the gather has read it", prefetch.prefetch,
        '"wait", {"after": site.q, "cursor": cursor, **state}',
        '"wait", {"after": site.q, "cursor": cursor, **state, "selected": state["slots"]}',
        "late", {**CORRECTED, "speculate": True}, in_the_graph=True,
    ),
]  # fmt: skip


@pytest.fixture(autouse=True)
def schedule(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the schedule after each test. A chunked prefill reads the host tier in blocks of 32 tokens."""
    monkeypatch.setattr(triton_extend, "HOST_BLOCK", 32)
    with one_run.undisturbed():
        yield
        copy_stream.release_staging()


@contextmanager
def planted(function: Callable[..., Any], line: str, instead: str) -> Iterator[None]:
    """Replace `line` of a function's source by `instead`, for existing references to the function too."""
    function = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, f"{function.__qualname__} has {line!r} {source.count(line)} times"
    made: dict[str, Any] = {}
    exec(compile(source.replace(line, instead), inspect.getfile(function), "exec"), function.__globals__, made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, "__code__", inspect.unwrap(made[function.__name__]).__code__)
        yield
        torch.cuda.synchronize()


@functools.cache
def expected_of(settings: tuple[tuple[str, Any], ...]) -> one_run.Result:
    return one_run.run("eager", **dict(settings))


def changed(fault: Fault, expected: one_run.Result) -> str:
    """Return the results that the planted fault changes, or its error; "" if it changes nothing."""
    if fault.in_the_graph:
        one_run.compile_again()
    try:
        with planted(fault.function, fault.line, fault.instead):
            return ", ".join(one_run.differences(expected, one_run.run(fault.schedule, **fault.settings)))
    except torch.AcceleratorError as error:
        return str(error).splitlines()[0]
    finally:
        if fault.in_the_graph:
            one_run.compile_again()


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_is_found(fault: Fault) -> None:
    expected = expected_of(tuple(fault.settings.items()))
    if fault.in_the_graph:  # a model that is compiled again gives the same results
        one_run.compile_again()
    assert not one_run.differences(expected, one_run.run(fault.schedule, **fault.settings))
    assert changed(fault, expected)


def test_a_capture_that_fails_leaves_the_stream_as_it_was() -> None:
    with pytest.raises(torch.AcceleratorError), planted(cuda_graphs.record, "copy_stream.join_capture(device)", "pass"):
        one_run.run("eager", mode="reduce-overhead")
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_a_step_that_fails_during_capture_reports_the_cause() -> None:
    """Its forked copy stream joins first: otherwise CUDA cannot end the capture, and its error hides the cause."""
    device = torch.device("cuda", 0)

    def failing() -> list[torch.Tensor]:
        copy_stream.stream_of(device).wait_stream(torch.cuda.current_stream(device))
        raise torch.OutOfMemoryError("the cause")

    with pytest.raises(torch.OutOfMemoryError, match="the cause"):
        cuda_graphs.record(failing, device)


@torch.no_grad()
def prefilled() -> Any:
    """Return a cache with copies in flight."""
    one_run.set_schedule("late")
    return cache_of(one_run.compiled(2, ())(prompt(one_run.PROMPT).cuda(), use_cache=True))


def give_host_memory_back() -> None:
    """Free host memory while copies to it are in flight."""
    prefilled()
    gc.collect()
    sc.release_host_memory()
    torch.cuda.synchronize()


def test_a_host_segment_that_is_freed_too_soon_is_found() -> None:
    give_host_memory_back()
    with (
        pytest.raises(torch.AcceleratorError, match="unspecified launch failure"),
        planted(host_memory.PinnedMap.__del__, "torch.cuda.synchronize()", "pass"),
    ):
        give_host_memory_back()


def what_a_dead_caches_fetches_write() -> float:
    """Return the largest number in memory that was zeroed after a cache with fetches in flight was freed."""
    torch.cuda.empty_cache()  # so that mainly the freed cache's memory is available
    cache = prefilled()
    with torch.no_grad():
        one_run.feed(one_run.compiled(2, ()), cache, prompt(1).cuda(), torch.full((1, 1), one_run.PROMPT).cuda())
    session = session_of(cache)
    places = [range(slots.data_ptr(), slots.data_ptr() + slots.nbytes) for slots in (s["slots"] for s in session.state)]
    del cache, session
    gc.collect()
    units = [torch.empty(128, device="cuda") for _ in range(1 << 13)]  # 512 bytes, the allocator's smallest block
    taken = [unit.zero_() for unit in units if any(unit.data_ptr() in place for place in places)]
    torch.cuda.synchronize()
    return max((float(each.abs().max()) for each in taken), default=0.0)


def test_an_allocation_reused_without_record_stream_is_found() -> None:
    assert what_a_dead_caches_fetches_write() == 0
    with planted(copy_stream.adopt, "state[field].record_stream(stream_of(state[field].device))", "pass"):
        assert what_a_dead_caches_fetches_write() > 0
