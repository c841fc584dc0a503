"""The key of a stored trace: each part distinguishes something that no other part does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers

from kept_traces import Traces, llama, run
from specache_compile.warm import trace_folder

Patch = pytest.MonkeyPatch


@contextlib.contextmanager
def other_state(change: Callable[[Any], None], now: Any, other: Any) -> Iterator[None]:
    change(other)
    try:
        yield
    finally:
        change(now)


def other_threads() -> AbstractContextManager[None]:
    return other_state(torch.set_num_threads, torch.get_num_threads(), torch.get_num_threads() + 1)


def other_precision() -> AbstractContextManager[None]:
    return other_state(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision(), "high")


# What an environment is made of, and a change that only this part tells.
ENVIRONMENT: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "python": lambda: patch.object(sys, "version", "3.99"),
    "torch": lambda: patch.object(torch, "__version__", "2.99"),
    "packages": lambda: patch.object(transformers, "__version__", "5.99"),
    "specache": lambda: patch.object(trace_folder, "own_sources", lambda: "another"),
    "processor": lambda: patch.object(trace_folder, "processor", lambda: "another"),
    "devices": lambda: patch.object(trace_folder, "devices", lambda: ["another"]),
    "settings": lambda: torch._inductor.config.patch(max_autotune=True),
    "kernels": lambda: patch.object(torch.backends.cuda, "flash_sdp_enabled", lambda: "another"),
}


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_each_part_of_the_environment_counts(name: str) -> None:
    before = trace_folder.components()
    assert list(before) == list(ENVIRONMENT)
    with ENVIRONMENT[name]():
        changed = trace_folder.components()
    assert [part for part in before if before[part] != changed[part]] == [name]


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
