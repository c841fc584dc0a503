"""By what a kept trace is known: each part tells something apart that nothing else does."""

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

import pytest
import torch
import transformers
from test_warm import halved_mlp, registered, with_hook
from transformers.models.llama import modeling_llama

from kept_traces import FULL, PREFILL, Traces, attribute, llama, logits, run
from specache_compile.warm import environment, form, guards, route

Patch = pytest.MonkeyPatch


@contextlib.contextmanager
def another_file() -> Iterator[None]:
    files = [*environment.files(), Path(__file__)]
    own_sources = environment.own_sources.__wrapped__
    with attribute(environment, "files", lambda: files), attribute(environment, "own_sources", own_sources):
        yield


# What an environment is made of, and a change that only this part tells.
ENVIRONMENT: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "python": lambda: attribute(sys, "version", "3.99"),
    "torch": lambda: attribute(torch, "__version__", "2.99"),
    "transformers": lambda: attribute(transformers, "__version__", "5.99"),
    "packages": lambda: attribute(environment, "version_of", lambda package: f"{package} of tomorrow"),
    "specache": another_file,
    "processor": lambda: attribute(environment, "processor", lambda: "another"),
    "threads": lambda: attribute(torch, "get_num_threads", lambda: 99),
    "settings": lambda: torch._inductor.config.patch(max_autotune=True),
    "precision": lambda: attribute(torch, "get_float32_matmul_precision", lambda: "medium"),
}


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_each_part_of_the_environment_counts(name: str) -> None:
    """It alone tells the change: without the part, the environment would be the same."""
    components = environment.components
    before, without = environment.environment(), environment_without(name, components)
    assert environment.environment() == before
    with ENVIRONMENT[name]():
        assert environment.environment() != before
        assert environment_without(name, components) == without


def environment_without(name: str, components: Callable[[], dict[str, str]]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "components", lambda: {n: text for n, text in components().items() if n != name})
        return environment.environment()


def test_the_parts_of_an_environment_are_these() -> None:
    assert list(environment.components()) == list(ENVIRONMENT)


def test_another_environment_traces(kept: Traces) -> None:
    with ENVIRONMENT["threads"]():
        assert run(llama(), kept) == 1


# Of a call: how it is left out, and what another process then takes for the same.


def told_without(name: str) -> Callable[[Patch], None]:
    def leave_out(patch: Patch) -> None:
        how = route.how
        patch.setattr(route, "how", lambda *given: {n: text for n, text in how(*given).items() if n != name})

    return leave_out


def own_builtin() -> AbstractContextManager[None]:
    """Another under a builtin's name, of which no module's source or functions tell."""
    return attribute(builtins, "all", functools.partial(builtins.all))


@contextlib.contextmanager
def own_mapping() -> Iterator[None]:
    """A mapping of the instance's own, which hides that of its class: no value says so."""
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
        told_without("options"), nullcontext, llama, {"options": {**FULL, "disable_passes": ["causal_prefill"]}},
    ),
    "fullgraph": (told_without("fullgraph"), nullcontext, llama, {"options": FULL, "fullgraph": True}),
    "code": (
        lambda patch: patch.setattr(form, "changed", lambda modules: None),
        lambda: attribute(modeling_llama.LlamaMLP, "forward", halved_mlp), llama, {"options": FULL},
    ),
    "what guards look at": (
        lambda patch: patch.setattr(guards, "difference", lambda *given: None), registered, llama, {"options": FULL},
    ),
    "guards that hold": (
        lambda patch: patch.setattr(guards, "check", lambda *given: None), own_mapping, llama, {"options": FULL},
    ),
    "builtins": (
        lambda patch: patch.setattr(guards, "check_builtins", lambda texts: None),
        own_builtin, llama, {"options": FULL},
    ),
    "hooks": (
        lambda patch: patch.setattr(route, "has_hooks", lambda model: False), nullcontext,
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
    """Traces of a process that runs a model, whatever it says."""
    traces.next_process()
    logits(torch.compile(model, backend="specache", **how), PREFILL)
    return int(traces.count)
