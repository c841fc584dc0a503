"""Inductor's generated code of the rewritten graphs."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import LlamaForCausalLM

from conftest import LOSSLESS, compiled_with, greedy, greedy_unmasked, left_padding, prompt, tiny_llama
from specache_compile.compile import rewrites
from specache_compile.compile.rewrites import Rewrites
from specache_compile.kernels.cpp import library as cpp_library
from specache_compile.lowering import lower
from specache_compile.lowering.late import guards
from specache_compile.runtime.records import find_record

OPTIONS = {**LOSSLESS, "lowering": "inductor"}


class Generated(NamedTuple):
    """A generation: the launches of each phase's wrapper, the pre-decode, and whether each C++ file that it loaded was
    compiled under a progress line."""

    code: dict[str, list[str]]
    pre_decode: Any
    loaded: dict[str, bool]


def launches(source: str) -> list[str]:
    """Return the lines of the wrapper's `call` with launches."""
    body = source.split("def call(")[1]
    pattern = re.compile(r"torch\.ops\.specache\.|extern_kernels\.|cpp_fused|aten\.|\.copy_\(|clone")
    return [line.strip() for line in body.splitlines() if pattern.search(line) and not line.strip().startswith("#")]


def names(lines: list[str]) -> list[str]:
    """Return specache op names, in C++ or not, and "work" for matrix products, in launch order."""
    found = []
    for line in lines:
        op = re.search(r"torch\.ops\.specache\.(\w+)\.default\(", line)
        if op and "assert" not in line:
            found.append(op.group(1).removesuffix("_fused"))
        elif "extern_kernels" in line:
            found.append("work")
    return found


def state_left_alone(lines: list[str]) -> int:
    """Require that only ops access state, as graph inputs; returns the number of state tensors."""
    state = set()
    for line in lines:
        call = re.search(r"torch\.ops\.specache\.(\w+)\.default\((.*)\)", line)
        if call:
            state |= set(re.findall(r"\barg\d+_1\b", call.group(2)))
    for line in lines:
        if "torch.ops.specache" not in line:
            assert not state & set(re.findall(r"\barg\d+_1\b", line)), line
    assert not any(".copy_(" in line or "aten.clone" in line for line in lines)
    return len(state)


@pytest.fixture(scope="module")
def generated() -> Generated:
    """Return what a generation leaves; the tokens must be right."""
    torch._dynamo.reset()
    loaded: dict[str, bool] = {}
    compiled, compiling, running = cpp_library.compiled, rewrites.compiling, list[str]()

    @contextmanager
    def noted(graph: str, how: str) -> Iterator[None]:
        running.append(graph)
        with compiling(graph, how):
            yield
        running.clear()

    def load(names: Sequence[str], *rest: Any) -> Any:
        loaded.setdefault(names[-1], bool(running))
        return compiled(names, *rest)

    for library in (cpp_library.decode_library, cpp_library.tiers_library):
        library.cache_clear()
    llama = tiny_llama()
    twin = compiled_with(llama, OPTIONS)
    with patch.object(cpp_library, "compiled", load), patch.object(rewrites, "compiling", noted):
        tokens, sources = run_and_get_code(lambda: greedy_unmasked(twin, prompt(70), 30))
    assert torch.equal(tokens, greedy(llama, prompt(70), 30))
    forms = [form for graph in find_record(twin).graphs for form in graph.rewrites.made.values()]
    phases = [form.variant.phase.name for form in forms if not form.variant.phase.once]
    assert len(sources) == len(phases)
    (pre_decode,) = [form.run for form in forms if form.variant.phase.once]  # it runs op by op
    code = {phase: launches(source) for phase, source in zip(phases, sources, strict=True)}
    return Generated(code, pre_decode, loaded)


def test_code_that_inductor_cached_for_other_ops_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cached code contains the shapes that the ops' fakes had when it was made."""
    misses, mode = [], FakeTensorMode(shape_env=ShapeEnv())
    with fresh_cache():
        for version in ("one", "one", "another"):
            monkeypatch.setattr(lower, "hash_of_ops", lambda version=version: version)
            counters.clear()
            graph = symbolic_trace(lambda x: (torch.sin(x),))
            with tracing(TracingContext(mode)):
                run = lower.lower(graph, [mode.from_tensor(torch.ones(3))], "inductor", {}, None)
            torch.testing.assert_close(run(torch.ones(3))[0], torch.ones(3).sin())
            misses.append(counters["inductor"]["fxgraph_cache_miss"])
    assert misses == [1, 0, 1]


def test_work_stands_between_a_prefetch_and_its_wait(generated: Generated) -> None:
    """From layer 0's prefetch to the end of the step, and to layer 0's wait in the next step."""
    order = names(generated.code["decode"])
    behind = order[order.index("prefetch") :].count("work") + order[: order.index("wait")].count("work")
    assert behind == order.count("work")


def test_the_pre_decode_runs_op_by_op_with_the_kernels_of_the_compiled_step(generated: Generated) -> None:
    """The pre-decode fetches and stores nothing."""
    run = generated.pre_decode
    assert isinstance(run, GraphModule)
    called = re.findall(r"torch\.ops\.specache\.(\w+)\.default\(", run.code)
    assert called == 2 * ["wait", "decode_attention_fused", "select_topk_fused", "prefetch_fused"]


def test_the_steps_cpp_is_compiled_under_a_progress_line(generated: Generated) -> None:
    """The C++ is not compiled in the first step."""
    assert generated.loaded == {"attention/cpp_decode.cpp": True, "movement/cpp_tiers.cpp": True}


def test_the_prefill_stores_each_layer_as_soon_as_possible(generated: Generated) -> None:
    # torch 2.11 makes a batched product of the rotary table's angles, later versions a multiplication.
    order = names([line for line in generated.code["prefill"] if "extern_kernels.bmm" not in line])
    assert order[:5] == ["work", "work", "work", "offload", "append"]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_no_state_tensor_is_cloned_or_copied(generated: Generated, phase: str) -> None:
    assert state_left_alone(generated.code[phase]) > 8


@pytest.mark.quick_for
@pytest.mark.parametrize("settings", [{"speculate": False, "bits": 4}, {"top_k": 0, "bits": 16}])
def test_inductor_gives_the_uncompiled_tokens(llama: LlamaForCausalLM, settings: dict) -> None:
    twin = compiled_with(llama, {**OPTIONS, **settings})
    ids = prompt(80, 2)
    mask = left_padding(ids, 0, 30)
    assert torch.equal(greedy(twin, ids, 40, attention_mask=mask), greedy(llama, ids, 40, attention_mask=mask))


def guards_on_capacity(rewrites: Rewrites) -> list[Any]:
    """Return guards on the symbols of a state's capacity."""
    capacities = {size.node.expr for size in rewrites.captured.sizes.values()}
    return [guard for guard in guards(rewrites.captured.fake_mode) if capacities & guard.free_symbols]


SETTINGS: dict[str, dict[str, Any]] = {
    "kivi": {"method": "kivi", "bits": 16},
    "kivi, no host tier": {"method": "kivi", "bits": 16, "host_tier": False},
    "kcache": {"method": "kcache", "top_n": 1024},
    "offload": {"method": "offload"},
    "full": {"method": "full"},
    "h2o": {"method": "h2o", "budget": 1024},
    "two lanes": {"bits": 16, "speculate": True},
}


@pytest.mark.quick_for
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_no_guard_depends_on_the_capacity(llama: LlamaForCausalLM, settings: dict[str, Any]) -> None:
    """Compiling adds guards on all sizes except the capacity; a graph from Inductor's caches adds none."""
    twin, ids = copy.deepcopy(llama), torch.cat([prompt(120), prompt(120)], 1)
    with torch._inductor.config.patch(force_disable_caches=True):
        twin.compile(backend="specache", options={"lowering": "inductor", **settings})
        assert torch.equal(greedy(twin, ids, 40), greedy(llama, ids, 40))
    assert not any(guards_on_capacity(graph.rewrites) for graph in find_record(twin).graphs)
