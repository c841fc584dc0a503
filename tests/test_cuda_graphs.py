"""What surrounds a captured step, on any machine: a stand-in for the CUDA graph runs the step when it is replayed.

The capture itself is tested on a GPU (test_gpu.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from transformers import LlamaForCausalLM

from conftest import LOSSLESS, compile_copy, greedy, greedy_unmasked, prompt, tiny_llama
from specache_compile.kernels import copy_stream
from specache_compile.lowering import cuda_graphs
from specache_compile.lowering.cuda_graphs import CapturedSteps, capture, reason_not_to_capture, record
from specache_compile.passes.context import Context, Input

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Recording notes the inputs' addresses by closure, as CUDA does; a replay writes the same outputs again."""
    recorded: list[int] = []

    def record(step: Callable[[], Sequence[Any]], device: torch.device) -> tuple[Callable[[], object], list[Any]]:
        outputs: list[Any] = []

        def replay() -> None:
            made = list(step())
            if not outputs:
                outputs.extend(made)
            for old, new in zip(outputs, made, strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)

        recorded.append(1)
        return replay, outputs

    monkeypatch.setattr(cuda_graphs, "record", record)
    return recorded


def step(x: Tensor, weight: Tensor, state: Tensor) -> list[Tensor]:
    state += 1
    return [x * weight + state]


def test_a_replay_reads_new_arguments_and_leaves_old_outputs_alone() -> None:
    x, weight, state = torch.ones(3), torch.nn.Parameter(torch.full((3,), 2.0), requires_grad=False), torch.zeros(3)
    captured = capture(step, [x, weight, state], [False, False, True], CPU)
    first = captured([torch.ones(3), weight, state])[0]
    second = captured([torch.full((3,), 5.0), weight, state])[0]
    assert first.tolist() == [3.0] * 3
    assert second.tolist() == [12.0] * 3


def test_arguments_of_inference_mode_can_be_replayed_outside_of_it() -> None:
    weight, state = torch.nn.Parameter(torch.ones(3), requires_grad=False), torch.zeros(3)
    with torch.inference_mode():
        captured = capture(step, [torch.ones(3), weight, state], [False, False, True], CPU)
    assert captured([torch.ones(3), weight, state])[0].tolist() == [2.0] * 3


def test_a_parameter_that_moved_is_captured_anew(stand_in: list[int]) -> None:
    steps, state = CapturedSteps(), torch.zeros(3)
    for value in (2.0, 3.0):
        weight = torch.nn.Parameter(torch.full((3,), value), requires_grad=False)
        for _ in range(3):
            out = steps.run(step, [torch.ones(3), weight, state], [False, False, True], CPU, pytest.fail)[0]
        assert out.tolist() == [value + float(state[0])] * 3
    assert (len(stand_in), steps.replays) == (2, 5)


def test_an_input_that_moves_in_every_step_is_given_up_on_after_two_recaptures(stand_in: list[int]) -> None:
    steps, state, told = CapturedSteps(), torch.zeros(1 << 19), []
    weight = torch.nn.Parameter(torch.ones(1 << 19), requires_grad=False)
    for number in range(5):
        x = torch.full((1 << 19,), float(number))  # 2 MiB, each elsewhere: the one before is still there
        told.append((x, []))
        out = steps.run(step, [x, weight, state], [False, False, True], CPU, told[-1][1].append)[0]
        assert out[0] == number + state[0]
    assert [given_up for _, given_up in told] == [[], [], [], [], [0]]
    assert len(stand_in) == 3
    assert step not in steps.steps, "a graph that is not replayed again holds no memory"


def test_recaptures_with_replays_between_them_go_on(stand_in: list[int]) -> None:
    steps, state, kept = CapturedSteps(), torch.zeros(1), []
    for _ in range(6):
        kept.append(torch.nn.Parameter(torch.ones(1), requires_grad=False))
        for _ in range(2):
            steps.run(step, [torch.ones(1), kept[-1], state], [False, False, True], CPU, pytest.fail)
    assert len(stand_in) == 6


def test_a_large_argument_that_moves_costs_the_graph_and_one_warning_that_names_it(
    stand_in: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "captures_on", lambda device: True)
    monkeypatch.setattr(cuda_graphs, "COPIED_BYTES", 16)
    llama = tiny_llama()
    twin = compile_copy(llama, mode="reduce-overhead")
    vectors, kept = llama.get_input_embeddings().weight.detach(), []

    def run(model: LlamaForCausalLM) -> Tensor:
        logits = []
        with torch.no_grad():
            cache = model(prompt(50), use_cache=True).past_key_values
            for place in range(50, 60):
                kept.append(vectors[place].clone().view(1, 1, -1))
                given = {"inputs_embeds": kept[-1], "position_ids": torch.tensor([[place]])}
                logits.append(model(**given, past_key_values=cache).logits)
        return torch.cat(logits)

    with pytest.warns(UserWarning, match="any more: input .*inputs_embeds.* lies elsewhere in every step") as warned:
        generations = [run(twin), run(twin)]
    assert len([w for w in warned if "any more" in str(w.message)]) == 1
    assert len(stand_in) == 3, "one capture, two more, and none in the second generation"
    torch.testing.assert_close(generations, [run(llama)] * 2, atol=1e-3, rtol=1e-3)


def symbolic(length: int, batch: int) -> tuple[Tensor, Tensor]:
    """Fakes of new keys [B, H, 1, d] and of a mask [B, 1, 1, n], with symbols for B and n."""
    mode, dynamic = FakeTensorMode(shape_env=ShapeEnv()), DimDynamic.DYNAMIC
    static = DimDynamic.STATIC
    keys, mask = torch.empty(batch, 2, 1, 8), torch.empty(batch, 1, 1, length)
    return (
        mode.from_tensor(keys, symbolic_context=StatelessSymbolicContext([dynamic, static, static, static])),
        mode.from_tensor(mask, symbolic_context=StatelessSymbolicContext([static, static, static, dynamic])),
    )


@pytest.mark.parametrize(("read", "reason"), [("keys", "the batch size is symbolic"), ("mask", "changes its size")])
def test_a_symbolic_batch_is_told_from_a_length_that_grows(read: str, reason: str) -> None:
    graph = torch.fx.Graph()
    nodes = {name: graph.placeholder(name) for name in ("keys", "mask")}
    graph.output((graph.call_function(torch.neg, (nodes[read],)),))
    nodes["keys"].meta["val"], nodes["mask"].meta["val"] = symbolic(40, 3)
    inputs = [Input("argument", argument=0), Input("argument", argument=1)]
    settings = {"top_k": 4, "speculate": False, "hit_rate": False, "recipe": None, "state": []}
    context = Context("decode", **settings, cursor=torch.empty(4), inputs=inputs)
    context.sites.append(SimpleNamespace(k=nodes["keys"]))
    told = str(reason_not_to_capture(torch.fx.GraphModule({}, graph), context))
    assert told.startswith(reason) or f"input {read} {reason}" in told
    assert ("padding" in told) == (read == "mask")


@pytest.mark.parametrize("speculate", [True, False], ids=["two lanes", "one lane"])
def test_replayed_steps_make_the_uncompiled_models_tokens_across_buckets(
    llama: LlamaForCausalLM, speculate: bool, stand_in: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 200 to 520 tokens there are three buckets: each is warmed up, captured once, and replayed."""
    monkeypatch.setattr(cuda_graphs, "captures_on", lambda device: True)
    twin = copy.deepcopy(llama)
    options = {**LOSSLESS, "lowering": "eager", "mode": "reduce-overhead", "speculate": speculate}
    twin.compile(backend="specache", options=options)
    ids = prompt(200)
    assert torch.equal(greedy_unmasked(twin, ids, 320), greedy_unmasked(llama, ids, 320))
    assert len(stand_in) == 3


def test_a_forks_steps_are_its_own(
    llama: LlamaForCausalLM, stand_in: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "captures_on", lambda device: True)
    twin = copy.deepcopy(llama)
    twin.compile(backend="specache", options={**LOSSLESS, "lowering": "eager", "mode": "reduce-overhead"})

    def run(model: LlamaForCausalLM) -> Tensor:
        with torch.no_grad():
            cache = model(prompt(100), use_cache=True).past_key_values
            for token in range(4):
                decode(model, token, 100 + token, cache)
            fork = copy.deepcopy(cache)
            return torch.cat([decode(model, t, 104 + t, c) for t in range(4) for c in (cache, fork)])

    def decode(model: LlamaForCausalLM, token: int, position: int, cache: Any) -> Tensor:
        place = torch.tensor([[position]])
        return model(torch.tensor([[token]]), past_key_values=cache, position_ids=place).logits

    torch.testing.assert_close(run(twin), run(llama), atol=1e-3, rtol=1e-3)
    assert len(stand_in) == 2


def test_a_session_whose_host_tier_is_not_pinned_runs_its_steps_as_they_are(
    llama: LlamaForCausalLM, stand_in: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "captures_on", lambda device: True)
    twin = compile_copy(llama, lowering="eager", mode="reduce-overhead")
    with torch.no_grad():
        cache = twin(prompt(40), use_cache=True).past_key_values
        session = cache.layers[0].keys.handle.session
        session.capturable = False
        for place in range(40, 44):
            twin(torch.tensor([[1]]), past_key_values=cache, position_ids=torch.tensor([[place]]))
        assert not stand_in
        session.capturable = True
        for place in range(44, 46):
            twin(torch.tensor([[1]]), past_key_values=cache, position_ids=torch.tensor([[place]]))
        assert len(stand_in) == 1


def test_a_left_padded_batch_says_why_it_is_not_captured(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "captures_on", lambda device: True)
    twin = copy.deepcopy(llama)
    twin.compile(backend="specache", options={**LOSSLESS, "lowering": "eager", "mode": "reduce-overhead"})
    ids = prompt(40, 2)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    with pytest.warns(UserWarning, match="no CUDA graph of the decode step: input .*mask.* changes its size"):
        twin.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)


def test_a_step_that_fails_while_it_is_captured_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy stream is brought back first: CUDA ends no capture without it, and its error would hide the cause."""
    joined: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda *given, **settings: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(cuda_graphs, "capture_stream", lambda device: None)
    monkeypatch.setattr(copy_stream, "join_capture", joined.append)

    def failing() -> list[Tensor]:
        raise torch.OutOfMemoryError("the cause")

    with pytest.raises(torch.OutOfMemoryError, match="the cause"):
        record(failing, CPU)
    assert joined == [CPU]


def test_a_step_is_captured_on_a_stream_of_its_device_while_that_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own capture stream is of the device that captured first, whichever the model is on."""
    told: list[Any] = []

    @contextmanager
    def noted(*given: Any, **settings: Any) -> Iterator[None]:
        told.append(settings.get("stream", given[0]))
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", noted)
    monkeypatch.setattr(torch.cuda, "device", noted)
    monkeypatch.setattr(cuda_graphs, "capture_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(copy_stream, "join_capture", lambda device: None)
    record(list, torch.device("cuda:1"))
    assert told == [torch.device("cuda:1"), "stream of cuda:1"]


def test_a_step_with_an_argument_elsewhere_than_its_state_is_not_captured() -> None:
    """What a kernel got from a number in host memory is part of the capture: a replay would take the old one."""
    graph = torch.fx.Graph()
    x, factor = (graph.placeholder(name) for name in ("x", "factor"))
    graph.output((graph.call_function(torch.mul, (x, factor)),))
    x.meta["val"], factor.meta["val"] = torch.empty(3, device="meta"), torch.empty(())
    inputs = [Input("argument", argument=0), Input("argument", argument=1)]
    settings = {"top_k": 4, "speculate": False, "hit_rate": False, "recipe": None, "state": []}
    context = Context("decode", **settings, cursor=torch.empty(4, device="meta"), inputs=inputs)
    step = torch.fx.GraphModule({}, graph)
    assert "input factor is on cpu" in str(reason_not_to_capture(step, context))
    factor.meta["val"] = torch.empty((), device="meta")
    assert reason_not_to_capture(step, context) is None


def test_nothing_is_captured_on_a_cpu(llama: LlamaForCausalLM, stand_in: list[int]) -> None:
    twin = compile_copy(llama, lowering="eager")
    greedy(twin, prompt(30), 5)
    assert not stand_in
