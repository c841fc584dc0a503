"""A step that is interrupted at any moment can be called again: equal tokens, none lost, no request stuck."""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from typing import Any

import pytest
import torch
from test_batch import all_free, run_alone

import specache_compile as sc
from conftest import eager, new_tokens, prompt, tiny_llama
from held_tiers import AfterLines, Interrupt
from specache_compile.batching.request import End, Request

pytestmark = pytest.mark.one_process

CHUNK = 48
# Of each request its prompt's length, and what it asks for.
ASKED: list[tuple[int, dict[str, Any]]] = [
    (70, {"max_new_tokens": 4}),
    (9, {"max_new_tokens": 4, "do_sample": True, "seed": 3}),
    (40, {"max_new_tokens": 3}),
]
Delivered = dict[Request, list[int]]


@pytest.fixture(scope="module")
def plain() -> Any:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    return tiny_llama(hidden_size=32, intermediate_size=48, num_hidden_layers=1, **heads)


@pytest.fixture(scope="module")
def model(plain: Any) -> Any:
    return eager(plain, bits=16)


def requests_of(batch: sc.Batch) -> list[Request]:
    return [batch.add(prompt(length, seed=length), **requested) for length, requested in ASKED]


@pytest.fixture(scope="module")
def expected(plain: Any, model: Any) -> list[list[int]]:
    """What each request generates alone; the greedy ones by the uncompiled model."""
    said = []
    for length, requested in ASKED:
        ids = prompt(length, seed=length)
        said.append(run_alone(model, ids, **requested).generated)
        if "seed" not in requested:
            assert said[-1] == new_tokens(plain, ids, len(said[-1]))
    return said


def run(batch: sc.Batch, delivered: Delivered) -> int:
    """Step until all requests are over; the number of steps that raised."""
    raised = 0
    for _ in range(200):
        try:
            if not batch.open:
                break
            for request, token in batch.step():
                delivered[request].append(token)
        except Interrupt:
            raised += 1
    return raised


def check(batch: sc.Batch, requests: list[Request], delivered: Delivered, expected: list[list[int]]) -> None:
    assert not batch.open
    for request, said in zip(requests, expected, strict=True):
        assert request.end is End.LENGTH, request.error
        assert request.generated == said
        assert delivered[request] == said
    assert all_free(batch)


def lines_of(batch: sc.Batch) -> int:
    """Lines of a run, after a first one, which has more."""
    for _ in range(2):
        requests_of(batch)
        with AfterLines(None) as counter:
            batch.run()
    return counter.lines


@pytest.mark.parametrize("sessions", [0, 2])
def test_interrupts_at_a_hundred_moments_change_no_token(model: Any, expected: list[list[int]], sessions: int) -> None:
    batch, numbers = sc.Batch(model, chunk=CHUNK, sessions=sessions), random.Random(0)
    lines, raised = lines_of(batch), 0
    for _ in range(100):
        requests, delivered = requests_of(batch), defaultdict[Request, list[int]](list)
        with AfterLines(numbers.randrange(1, lines)):
            raised += run(batch, delivered)
        check(batch, requests, delivered, expected)
    assert raised > 75


@pytest.mark.parametrize(("name", "sessions"), [("add", 0), ("remove", 0), ("remove", 2)])
def test_an_interrupt_between_two_steps_leaves_no_request_behind(model: Any, name: str, sessions: int) -> None:
    batch = sc.Batch(model, chunk=CHUNK, sessions=sessions)

    def interrupted(moment: int | None) -> int:
        """Interrupt a method behind so many of its lines; the number of lines that it executed."""
        stays, leaves = (batch.add(prompt(length), max_new_tokens=4) for length in (9, 20))
        while not leaves.generated:
            batch.step()
        with contextlib.suppress(Interrupt), AfterLines(moment) as counter:
            batch.add(prompt(5), max_new_tokens=1) if name == "add" else getattr(batch, name)(leaves)
        batch.run()
        assert stays.end is End.LENGTH
        # The first line of `remove` has not entered its `try`.
        assert leaves.end is (End.LENGTH if name == "add" or moment == 1 else End.REMOVED)
        assert all_free(batch)
        return counter.lines

    lines = interrupted(None)
    for moment in range(1, lines + 1, 1 + lines // 10):
        interrupted(moment)


def test_rows_over_which_the_model_always_fails_end_with_their_error(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = sc.Batch(model, chunk=CHUNK)
    requests = requests_of(batch)
    ask = batch.call_model

    def fail(tokens: Any, *rest: Any) -> Any:
        if tokens.shape[1] == 1 and any(request.reached == 2 for request in batch.decoding):
            raise RuntimeError("planted")
        return ask(tokens, *rest)

    monkeypatch.setattr(batch, "call_model", fail)
    batch.run()
    assert [(request.end, str(request.error)) for request in requests] == [(End.FAILED, "planted")] * 3


@pytest.mark.parametrize(("shape", "failed"), [((1, 9), [1]), ((2, 1), [0, 1])], ids=["prefill", "decode"])
def test_a_call_that_fails_ends_its_requests_and_no_others(
    model: Any, expected: list[list[int]], shape: tuple[int, int], failed: list[int], logged: list[str]
) -> None:
    batch, errors = sc.Batch(model, chunk=CHUNK), [RuntimeError("planted")]
    requests, ask = requests_of(batch), batch.call_model

    def failing(tokens: Any, *rest: Any) -> Any:
        if tokens.shape == shape and errors:
            raise errors.pop()
        return ask(tokens, *rest)

    batch.call_model = failing  # type: ignore[method-assign]
    batch.run()
    assert logged == [f"a call for {len(failed)} requests has failed"]
    assert all(getattr(requests[number].error, "__traceback__", 1) is None for number in failed), "it holds tensors"
    for number, (request, said) in enumerate(zip(requests, expected, strict=True)):
        if number in failed:
            assert (request.end, str(request.error)) == (End.FAILED, "planted")
        else:
            assert (request.end, request.generated) == (End.LENGTH, said)
    assert all_free(batch)


def run_interrupted(batch: sc.Batch, request: Request, after: int) -> None:
    """Run a batch; the call of the model after so many generated tokens of a request is interrupted, once."""
    ask, errors = batch.call_model, [Interrupt()]

    def interrupted(*given: Any) -> Any:
        if len(request.generated) == after and errors:
            raise errors.pop()
        return ask(*given)

    batch.call_model = interrupted  # type: ignore[method-assign]
    with pytest.raises(Interrupt):
        batch.run()
    batch.run()
    assert request.end is End.LENGTH, request.error


def test_an_interrupted_request_generates_the_same_tokens_in_a_lossy_setting() -> None:
    """A prefill of the known tokens would store other pairs than their decode steps did."""
    model = eager(tiny_llama(), bits=1, min_context=0, method="kivi")
    expected = run_alone(model, prompt(400), chunk=512, max_new_tokens=40)
    for after in (1, 20, 39):
        batch = sc.Batch(model, chunk=512)
        request = batch.add(prompt(400), max_new_tokens=40)
        run_interrupted(batch, request, after)
        assert request.generated == expected.generated


def test_memory_stays_within_its_bound_after_an_interrupt() -> None:
    """The pool's tensors stay, and so does a session."""
    model = eager(tiny_llama(num_hidden_layers=1), bits=16, min_context=0)
    batch = sc.Batch(model, rows=2, host_memory=8 << 20, sessions=1)
    first = batch.add(prompt(300), max_new_tokens=4)
    batch.run()
    pool = batch.memory.pool
    tensors = [tensor.data_ptr() for state in pool.state for tensor in state.values()]
    other = batch.add(torch.cat([prompt(290), first.ids[:, :9]], 1), max_new_tokens=6)
    run_interrupted(batch, other, 2)
    assert batch.memory.pool is pool
    assert [tensor.data_ptr() for state in pool.state for tensor in state.values()] == tensors
    assert pool.held == 2
    turn = batch.add(torch.cat([other.ids, prompt(20)], 1), max_new_tokens=4)
    batch.run()
    assert turn.reused == 304
    assert turn.generated == new_tokens(model, turn.ids[:, :325], 4)
    assert all_free(batch)
