"""The code around a captured step, on any machine: a substitute for the CUDA graph runs the step in each replay.

The capture itself is tested on a GPU (test_gpu.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaForCausalLM

import specache_compile as sc
from conftest import compile_copy, greedy, greedy_unmasked, prompt, step, tiny_llama
from families import BY_NAME
from held_tiers import untouched
from specache_compile.compat import cache_of, with_cache
from specache_compile.lowering import cuda_graphs
from specache_compile.lowering.cuda_graphs import RecordedSteps, capture, reason_not_to_capture
from specache_compile.passes.phase import DECODE
from specache_compile.passes.plan import Input, RewritePlan
from specache_compile.passes.reading.in_place import written_inputs

CPU = torch.device("cpu")


@pytest.fixture
def llama() -> LlamaForCausalLM:
    """Return a model of one layer: a step is captured whole, whatever its depth."""
    return tiny_llama(num_hidden_layers=1)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace recording: it keeps the inputs' addresses by closure, like CUDA, and a replay rewrites the same outputs.

    Returns: an entry for each recording.
    """
    recorded: list[int] = []

    def record(
        step: Callable[[], Sequence[Any]], device: torch.device, memory: Any
    ) -> tuple[Callable[[], object], list[Any], Any]:
        outputs: list[Any] = []

        def replay() -> None:
            made = list(step())
            if not outputs:
                outputs.extend(made)
            for old, new in zip(outputs, made, strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)

        recorded.append(1)
        return replay, outputs, None

    monkeypatch.setattr(cuda_graphs, "record", record)
    return recorded


@pytest.fixture
def captures(stand_in: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let steps on the CPU be captured; returns an entry for each capture."""
    monkeypatch.setattr(cuda_graphs, "captures_on", lambda device: True)
    return stand_in


def multiplied(x: Tensor, weight: Tensor, state: Tensor) -> list[Tensor]:
    state += 1
    return [x * weight + state]


def test_a_replay_reads_new_arguments_and_leaves_old_outputs_alone() -> None:
    x, weight, state = torch.ones(3), torch.nn.Parameter(torch.full((3,), 2.0), requires_grad=False), torch.zeros(3)
    captured = capture(multiplied, [x, weight, state], [False, False, True], CPU)
    first = captured([torch.ones(3), weight, state])[0]
    second = captured([torch.full((3,), 5.0), weight, state])[0]
    assert first.tolist() == [3.0] * 3
    assert second.tolist() == [12.0] * 3


def test_arguments_of_inference_mode_can_be_replayed_outside_of_it() -> None:
    weight, state = torch.nn.Parameter(torch.ones(3), requires_grad=False), torch.zeros(3)
    with torch.inference_mode():
        captured = capture(multiplied, [torch.ones(3), weight, state], [False, False, True], CPU)
    assert captured([torch.ones(3), weight, state])[0].tolist() == [2.0] * 3


def test_a_step_is_captured_again_after_a_parameter_moved(stand_in: list[int]) -> None:
    steps, state = RecordedSteps(), torch.zeros(3)
    for value in (2.0, 3.0):
        weight = torch.nn.Parameter(torch.full((3,), value), requires_grad=False)
        for _ in range(3):
            out = steps.run(multiplied, [torch.ones(3), weight, state], [False, False, True], CPU, pytest.fail)[0]
        assert out.tolist() == [value + float(state[0])] * 3
    assert (len(stand_in), steps.replays) == (2, 5)


def test_an_input_that_moves_in_every_step_is_given_up_on_after_two_recaptures(stand_in: list[int]) -> None:
    steps, state, calls = RecordedSteps(), torch.zeros(1 << 19), []
    weight = torch.nn.Parameter(torch.ones(1 << 19), requires_grad=False)
    for number in range(5):
        x = torch.full((1 << 19,), float(number))  # 2 MiB at a new address, since the previous tensor is still alive
        calls.append((x, []))
        out = steps.run(multiplied, [x, weight, state], [False, False, True], CPU, calls[-1][1].append)[0]
        assert out[0] == number + state[0]
    assert [given_up for _, given_up in calls] == [[], [], [], [], [0]]
    assert len(stand_in) == 3
    assert multiplied not in steps.steps, "a graph that is not replayed again holds no memory"


@pytest.mark.parametrize(("moves", "rows", "runs"), [(6, (1,), 2), (4, (1, 2, 3), 1)], ids=["replayed", "in turn"])
def test_graphs_that_move_between_replays_or_in_turn_go_on(
    moves: int, rows: tuple[int, ...], runs: int, stand_in: list[int]
) -> None:
    """In turn: a hybrid's graphs of one, two and three rows, whose state moves with each joining row."""
    steps, state, kept = RecordedSteps(), torch.zeros(1), []
    for _ in range(moves):
        for count in rows:
            kept.append(torch.nn.Parameter(torch.ones(1), requires_grad=False))
            given = [torch.ones(1), kept[-1], state]
            for _ in range(runs):
                steps.run(multiplied, given, [False, False, True], CPU, pytest.fail, (count,))
    assert len(stand_in) == (6 if runs == 2 else 3 * 3)


def test_a_large_argument_that_moves_costs_the_graph_and_one_warning_that_names_it(
    llama: LlamaForCausalLM, captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "COPIED_BYTES", 16)
    twin = compile_copy(llama, mode="reduce-overhead")
    vectors, kept = llama.get_input_embeddings().weight.detach(), []

    def run(model: LlamaForCausalLM) -> Tensor:
        cache, logits = cache_of(step(model, prompt(50))), []
        with torch.no_grad():
            for place in range(50, 60):
                kept.append(vectors[place].clone().view(1, 1, -1))
                given = {"inputs_embeds": kept[-1], "position_ids": torch.tensor([[place]])}
                logits.append(model(**given, **with_cache(cache)).logits)
        return torch.cat(logits)

    text = "now runs without a CUDA graph: input .*inputs_embeds.* has a new address in every step"
    with pytest.warns(UserWarning, match=text) as warned:
        generations = [run(twin), run(twin)]
    assert len([w for w in warned if "new address" in str(w.message)]) == 1
    assert len(captures) == 3, "one capture, two more, and none in the second generation"
    torch.testing.assert_close(generations, [run(llama)] * 2, atol=1e-3, rtol=1e-3)


@pytest.mark.quick_for("1")
@pytest.mark.parametrize("batch", [1, 3])
def test_steps_of_a_padded_batch_are_captured(llama: LlamaForCausalLM, batch: int, captures: list[int]) -> None:
    """The mask grows outside the graph, which reads the session's padding in place, across two buckets."""
    twin = compile_copy(llama, mode="reduce-overhead")
    ids = prompt(230, batch)
    mask = torch.ones_like(ids)
    mask[0, 3:41] = 0  # left padding becomes a length instead of a mask
    assert torch.equal(greedy(twin, ids, 60, attention_mask=mask), greedy(llama, ids, 60, attention_mask=mask))
    assert len(captures) == 2


def test_steps_of_calls_without_position_ids_are_captured(llama: LlamaForCausalLM, captures: list[int]) -> None:
    twin = compile_copy(llama, mode="reduce-overhead")

    def run(model: LlamaForCausalLM) -> Tensor:
        cache = cache_of(step(model, prompt(50, 2)))
        return torch.cat([step(model, token, cache).logits for token in prompt(9, 2).split(1, 1)], 1)

    torch.testing.assert_close(run(twin), run(llama), atol=1e-3, rtol=1e-3)
    assert len(captures) == 1


@pytest.mark.quick_for("two lanes")
@pytest.mark.parametrize("speculate", [True, False], ids=["two lanes", "one lane"])
def test_replayed_steps_make_the_uncompiled_models_tokens_across_buckets(speculate: bool, captures: list[int]) -> None:
    """From 250 to 515 tokens there are three buckets: each is warmed up, captured once, and replayed."""
    two_layers = tiny_llama()
    twin = compile_copy(two_layers, mode="reduce-overhead", speculate=speculate)
    assert torch.equal(greedy_unmasked(twin, prompt(250), 265), greedy_unmasked(two_layers, prompt(250), 265))
    stats = sc.stats(twin)
    assert stats.replays == stats.decodes - 3, "the first step of each bucket runs as it is"
    assert len(captures) == 3


def decode(model: LlamaForCausalLM, token: int, cache: Any, rows: int = 1) -> Tensor:
    """Return the logits of a step at position 100 + token."""
    place = torch.full((rows, 1), 100 + token)
    return step(model, torch.full((rows, 1), token), cache, position_ids=place).logits


def test_a_forks_steps_are_its_own(llama: LlamaForCausalLM, captures: list[int]) -> None:
    twin = compile_copy(llama, mode="reduce-overhead")

    def run(model: LlamaForCausalLM) -> Tensor:
        cache = cache_of(step(model, prompt(100)))
        for token in range(4):
            decode(model, token, cache)
        fork = copy.deepcopy(cache)
        return torch.cat([decode(model, token, c) for token in range(4, 8) for c in (cache, fork)])

    torch.testing.assert_close(run(twin), run(llama), atol=1e-3, rtol=1e-3)
    assert len(captures) == 3, "the first page that one of them copies makes their pool grow, and the pages move"


def test_steps_after_a_selection_of_rows_write_to_no_page_of_another_row(
    llama: LlamaForCausalLM, captures: list[int]
) -> None:
    """Three of four rows, as a beam search selects them: a pool without a null page has no padding rows."""
    twin = compile_copy(llama, mode="reduce-overhead")

    def run(model: LlamaForCausalLM) -> Tensor:
        cache = cache_of(step(model, prompt(100, 4)))
        logits = [decode(model, token, cache, 4) for token in range(3)]
        cache.batch_select_indices(torch.tensor([0, 1, 3]))
        return torch.cat([*logits, *(decode(model, token, cache, 3) for token in range(3, 8))])

    torch.testing.assert_close(run(twin), run(llama), atol=1e-3, rtol=1e-3)
    assert captures


@pytest.mark.slow
def test_a_recurrences_state_is_written_in_place(captures: list[int]) -> None:
    """This holds for any size of the state; rows with such a state are not padded."""
    hybrid = BY_NAME["qwen3_5_text"].model()
    twin = compile_copy(hybrid, mode="reduce-overhead")
    batch, requests, rows = sc.Batch(twin, rows=6), [], set()
    for length, tokens, steps in ((100, 30, 4), (70, 12, 3), (90, 9, 3)):
        requests.append(batch.add(prompt(length, seed=length), max_new_tokens=tokens))
        for _ in range(steps):
            batch.step()
            rows.add(len(batch.decoding))
    batch.run()
    assert rows == {1, 2, 3}
    for request in requests:
        ids, count = request.prompt[None], len(request.generated)
        assert torch.equal(request.ids, greedy(hybrid, ids, count))
    assert sc.stats(twin).replays > 15


def test_padding_rows_touch_only_page_0_and_the_state_of_future_rows(
    llama: LlamaForCausalLM, captures: list[int]
) -> None:
    """Three rows, one of which has replaced a finished row, run as four."""
    batch = sc.Batch(compile_copy(llama, top_k=8, mode="reduce-overhead"), rows=6, chunk=128)
    requests = [batch.add(prompt(100, seed=seed), max_new_tokens=40) for seed in range(4)]
    while len(batch.decoding) < 4:
        batch.step()
    batch.remove(requests[1])
    batch.step()
    pool, tiers = batch.memory.pool, batch.memory.tiers_of(batch.cache)
    nobodys = [layer["host"][0] for layer in pool.state]
    free = [x[page] for layer in pool.state for x in layer.values() for page in pool.free]
    behind = [x[4:] for layer in tiers.all_rows for name, x in layer.items() if len(x) == 6]
    for part in (*nobodys, *free, *behind):
        part.view(torch.uint8).fill_(0x7F)
    for _ in range(3):
        batch.step()
    assert len(batch.decoding) == 3
    assert not any(untouched(part) for part in nobodys)
    assert all(untouched(part) for part in (*free, *behind))


def test_a_batch_under_a_mask_beyond_padding_reports_why_it_is_not_captured(
    llama: LlamaForCausalLM, captures: list[int]
) -> None:
    twin = compile_copy(llama, mode="reduce-overhead")
    cache = cache_of(step(twin, prompt(40, 2)))
    mask = torch.ones(2, 1, 1, 41, dtype=torch.bool)
    with pytest.warns(UserWarning, match="runs without a CUDA graph: input .*mask.* changes its size"):
        step(twin, prompt(1, 2), cache, attention_mask=mask)


def test_a_step_with_an_argument_elsewhere_than_its_state_is_not_captured() -> None:
    """A kernel's argument from host memory is part of the capture: a replay would use the old value."""
    graph = torch.fx.Graph()
    x, factor = (graph.placeholder(name) for name in ("x", "factor"))
    graph.output((graph.call_function(torch.mul, (x, factor)),))
    x.meta["val"], factor.meta["val"] = torch.empty(3, device="meta"), torch.empty(())
    inputs = [Input("argument", argument=0), Input("argument", argument=1)]
    plan = RewritePlan(DECODE, [], True, False, None, [], torch.empty(1, 4, device="meta"), None, inputs)
    module = torch.fx.GraphModule({}, graph)
    assert "input factor is on cpu" in str(reason_not_to_capture(module, plan))
    factor.meta["val"] = torch.empty((), device="meta")
    assert reason_not_to_capture(module, plan) is None


def test_inputs_that_a_graph_writes_to_are_known_through_views() -> None:
    graph = torch.fx.Graph()
    table, state, x, scores, selected = map(graph.placeholder, ("table", "state", "x", "scores", "selected"))
    part = graph.call_function(torch.select, (state, 0, 1))
    graph.call_method("copy_", (part, x))
    graph.call_function(torch.ops.specache.select_topk.default, (scores, selected))  # writes to its second argument
    graph.output((graph.call_function(torch.neg, (table,)),))
    with FakeTensorMode():
        table.meta["val"], state.meta["val"], x.meta["val"] = torch.empty(2), torch.empty(2, 3), torch.empty(3)
        scores.meta["val"], selected.meta["val"] = torch.empty(4), torch.empty(4)
        part.meta["val"] = state.meta["val"].select(0, 1)
    assert written_inputs(torch.fx.GraphModule({}, graph)) == {1, 4}
