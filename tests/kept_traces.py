"""Consecutive processes, simulated in one process: each has only the files of earlier processes."""

from __future__ import annotations

import contextlib
import gc
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo import convert_frame
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.utils import output_capturing

from specache_compile.cache_folder import VARIABLE
from specache_compile.compat import with_cache
from specache_compile.warm import hooks, trace_folder

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 512,
}  # fmt: skip
PROMPT, LATER, STEPS = 90, 20, 2
# Token counts of calls: each has a graph, and the steps share one.
PREFILL, ALL = (PROMPT,), (PROMPT, *[1] * STEPS, LATER)
TESTS = Path(__file__).parent
# The cheapest method to trace; these tests do not depend on the method.
FULL = {"method": "full", "lowering": "eager"}


class Traces:
    """The number of Dynamo traces in the newest process. `next_process()` starts a process with only the files."""

    def __init__(self) -> None:
        self.count = 0

    def next_process(self) -> None:
        torch._dynamo.reset()
        hooks._loaded.clear()
        trace_folder.warn_once.cache_clear()
        gc.collect()  # this removes Dynamo's entries in modules, with their code
        self.count = 0


@contextlib.contextmanager
def counted(patch: pytest.MonkeyPatch) -> Iterator[Traces]:
    traces = Traces()
    compile_frame: Callable[..., Any] = convert_frame._compile

    def counting(*args: Any, **kwargs: Any) -> Any:
        traces.count += 1
        return compile_frame(*args, **kwargs)

    hooks.route_traces()  # importing the backend does this if $SPECACHE_CACHE is set
    patch.setattr(convert_frame, "_compile", counting)
    traces.next_process()
    yield traces
    traces.next_process()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of stored graphs."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path / trace_folder.TRACES


def new_registry() -> Any:
    """Dynamo guards on transformers' registry of a process's model classes."""
    return mock.patch.dict(output_capturing._CAN_RECORD_REGISTRY, clear=True)


@pytest.fixture
def traces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traces]:
    with new_registry(), counted(monkeypatch) as traces:
        yield traces


@pytest.fixture(scope="session")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the files that the process of a plain model has stored."""
    where = tmp_path_factory.mktemp("left")
    with pytest.MonkeyPatch.context() as patch, new_registry(), counted(patch) as traces:
        patch.setenv(VARIABLE, str(where))
        assert run(llama(), traces, ALL) == 3
    return where / trace_folder.TRACES


@pytest.fixture
def kept(left: Path, traces: Traces, folder: Path) -> Traces:
    """Return a copy of the store for this test."""
    shutil.copytree(left, folder)
    return traces


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).eval()


def logits(call: Callable[..., Any], sizes: Sequence[int] = ALL, rows: int = 1) -> Tensor:
    """Return logits of calls with these numbers of tokens, on one cache."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, SIZES["vocab_size"], (rows, sum(sizes)), generator=generator)
    cache, found, start = DynamicCache(), [], 0
    for size in sizes:
        ids, places = tokens[:, start : start + size], torch.arange(start, start + size).expand(rows, -1)
        with torch.no_grad():
            found.append(call(input_ids=ids, position_ids=places, **with_cache(cache), use_cache=True).logits)
        start += size
    return torch.cat(found, 1)


def run(
    model: Any, traces: Traces, sizes: Sequence[int] = PREFILL, rows: int = 1, options: Any = FULL, **how: Any
) -> int:
    """Run a model in a process and return its traces; the logits must equal the uncompiled model's. how: as for
    `torch.compile`."""
    traces.next_process()
    compiled = torch.compile(model, backend="specache", options=options, **how)
    torch.testing.assert_close(logits(compiled, sizes, rows), logits(model, sizes, rows), atol=2e-5, rtol=2e-5)
    return int(traces.count)


def in_new_process(code: str) -> str:
    """Return the output of a process that runs this code, with this process's environment and store."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
