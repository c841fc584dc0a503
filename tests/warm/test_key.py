"""The key of a stored trace: each part distinguishes something that no other part does."""

from __future__ import annotations

import builtins
import contextlib
import functools
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from test_warm import halved_mlp, registered, with_hook
from transformers.models.llama import modeling_llama

from kept_traces import FULL, PREFILL, Traces, attribute, llama, logits, run
from specache_compile.warm import guards, hooks, stored_trace, trace_folder

Patch = pytest.MonkeyPatch


@contextlib.contextmanager
def other_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def other_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# What an environment is made of, and a change that only this part tells.
ENVIRONMENT: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "python": lambda: attribute(sys, "version", "3.99"),
    "torch": lambda: attribute(torch, "__version__", "2.99"),
    "packages": lambda: attribute(transformers, "__version__", "5.99"),
    "specache": lambda: attribute(trace_folder, "own_sources", lambda: "another"),
    "processor": lambda: attribute(trace_folder, "processor", lambda: "another"),
    "devices": lambda: attribute(trace_folder, "devices", lambda: ["another"]),
    "settings": lambda: torch._inductor.config.patch(max_autotune=True),
    "kernels": lambda: attribute(torch.backends.cuda, "flash_sdp_enabled", lambda: "another"),
}


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_each_part_of_the_environment_counts(name: str) -> None:
    """Without the part, the environment's hash would not change."""
    components = trace_folder.components
    before, without = trace_folder.environment(), environment_without(name, components)
    assert trace_folder.environment() == before
    with ENVIRONMENT[name]():
        assert trace_folder.environment() != before
        assert environment_without(name, components) == without


def environment_without(name: str, components: Callable[[], dict[str, str]]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_folder, "components", lambda: {n: text for n, text in components().items() if n != name})
        return trace_folder.environment()


def test_the_parts_of_an_environment_are_these() -> None:
    assert list(trace_folder.components()) == list(ENVIRONMENT)


def test_another_environment_traces(kept: Traces) -> None:
    with ENVIRONMENT["devices"]():
        assert run(llama(), kept) == 1


@pytest.mark.parametrize("change", [other_threads, other_precision], ids=["threads", "precision"])
@pytest.mark.quick_for("threads")
def test_guards_reject_another_global_state(kept: Traces, change: Callable[[], AbstractContextManager[object]]) -> None:
    """The environment does not contain these."""
    environment = trace_folder.environment()
    with change():
        assert trace_folder.environment() == environment
        assert run(llama(), kept) == 1


# Of a call: how it is left out, and what another process then takes for the same.


def without_arguments(patch: Patch) -> None:
    """Leave the arguments of torch.compile out of a call's trace_folder."""
    call_key = trace_folder.call_key
    patch.setattr(trace_folder, "call_key", lambda code, local_scope, arguments: call_key(code, local_scope, None))


def same_hash(module: Any) -> Any:
    """Equal to every hash."""
    return mock.ANY


def own_builtin() -> AbstractContextManager[None]:
    """Another function under a builtin's name, which no module's source or functions show."""
    return attribute(builtins, "all", functools.partial(builtins.all))


@contextlib.contextmanager
def own_mapping() -> Iterator[None]:
    """A mapping of the instance that hides its class's mapping; no value shows it."""
    functions = modeling_llama.ALL_ATTENTION_FUNCTIONS
    vars(functions)["_global_mapping"] = dict(functions._global_mapping)
    try:
        yield
    finally:
        del vars(functions)["_global_mapping"]


Parts = tuple[
    Callable[[Patch], object], Callable[[], AbstractContextManager[object]], Callable[[], Any], dict[str, Any]
]
PARTS: dict[str, Parts] = {
    "options": (
        without_arguments, nullcontext, llama, {"options": {**FULL, "disable_passes": ["causal_prefill"]}},
    ),
    "fullgraph": (without_arguments, nullcontext, llama, {"options": FULL, "fullgraph": True}),
    "code": (
        lambda patch: patch.setattr(stored_trace, "module_hash", same_hash),
        lambda: attribute(modeling_llama.LlamaMLP, "forward", halved_mlp), llama, {"options": FULL},
    ),
    "what guards look at": (
        lambda patch: patch.setattr(guards, "compare", lambda *given: None), registered, llama, {"options": FULL},
    ),
    "guards that hold": (
        lambda patch: patch.setattr(guards, "check", lambda *given: None), own_mapping, llama, {"options": FULL},
    ),
    "builtins": (
        lambda patch: patch.setattr(guards, "compare", lambda *given: None),
        own_builtin, llama, {"options": FULL},
    ),
    "hooks": (
        lambda patch: patch.setattr(hooks, "has_hooks", lambda model: False), nullcontext,
        lambda: with_hook(llama()), {"options": FULL},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.quick_for("code")
def test_each_part_of_a_call_counts(traces: Traces, folder: Path, monkeypatch: Patch, name: str) -> None:
    """Without it, what was kept for a plain model would be taken for another."""
    leave_out, change, model, how = PARTS[name]
    assert run(llama(), traces) == 1
    with change():
        assert traced(model(), traces, how) == 1
    leave_out(monkeypatch)
    shutil.rmtree(folder)
    assert run(llama(), traces) == 1
    with change():
        assert traced(model(), traces, how) == 0


def traced(model: Any, traces: Traces, how: dict[str, Any]) -> int:
    """Traces of a process that runs a model, whatever it prints."""
    traces.next_process()
    logits(torch.compile(model, backend="specache", **how), PREFILL)
    return int(traces.count)
