"""Runs of a small compiled model in which the host runs ahead of the device, and their results."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import specache_compile as sc
from conftest import prompt, tiny_llama
from held_tiers import in_rows
from specache_compile.compat import cache_of, with_cache
from specache_compile.kernels.memory import host_memory
from specache_compile.runtime.session import session_of

# Settings without corrections, so that a late fetch, or a missing wait, changes the logits.
NEVER = {
    "lowering": "eager", "setting": "paper", "group_size": 32, "residual_length": 32, "top_k": 8, "min_context": 0,
}  # fmt: skip
PROMPT = 70  # tokens: more than are written through, and so many that two leave the window in the steps behind them

Result = dict[str, Tensor]


@contextmanager
def undisturbed() -> Iterator[None]:
    """Within this context, only explicit calls collect garbage.

    Unpinning waits for the device, and such a wait during a run hides a fault's effect.
    """
    gc.collect()
    host_memory.release_host_memory()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        set_schedule(os.environ["SIMULATED_SCHEDULE"])


def set_schedule(name: str) -> None:
    """Set the schedule of later queued work; work that is already queued runs first."""
    from simulated_device import driver

    torch.cuda.synchronize()
    driver.set_schedule(name)


def poison_free_memory() -> None:
    """Fill the allocator's free memory, and idle host memory, with NaN, and integers with -1.

    The previous run's values equal those that the next run writes, and would hide a read that is too early.
    """
    torch.cuda.empty_cache()
    for segment in torch.cuda.memory_snapshot():
        for block in segment["blocks"]:
            if block["state"] == "inactive" and tuple(segment["segment_pool_id"]) == (0, 0):
                ctypes.memset(block["address"], 0xFF, block["size"])
    for memory in host_memory._pool.idle:
        torch.frombuffer(memory, dtype=torch.uint8)[: memory.pinned] = 0xFF


@functools.cache
def compiled(layers: int, options: tuple[tuple[str, Any], ...]) -> Any:
    """Return one model for all runs with the same options, so that only the first run traces."""
    model = tiny_llama(num_hidden_layers=layers).cuda()
    model.compile(backend="specache", options={**NEVER, **dict(options)})
    return model


def compile_again() -> None:
    """Let the next runs trace and rewrite again."""
    compiled.cache_clear()
    torch._dynamo.reset()


def result_of(cache: DynamicCache, logits: list[Tensor]) -> Result:
    """Return the logits of all steps, and each layer's tiers: the host tier's cached tokens, and whole device tiers."""
    found = {"logits": torch.cat([each.flatten().cpu() for each in logits])}
    session = session_of(cache)
    session.tiers.drain()
    for number, state in enumerate(in_rows(session)):
        for name, tensor in state.items():
            whole = tensor[:, :, : session.length] if name == "host" else tensor
            found[f"{name} of layer {number}"] = whole.cpu().clone()
    return found


def feed(model: Any, cache: Any, tokens: Tensor, places: Tensor) -> Tensor:
    """Return the last token's logits, without any wait on the host."""
    return model(tokens, **with_cache(cache), position_ids=places, use_cache=True).logits[:, -1]


@torch.no_grad()
def run(schedule: str, layers: int = 2, more: int = 0, steps: int = 5, **options: Any) -> Result:
    """Run a prompt, `more` tokens in one further call, and decode steps, with fixed tokens; read results at the end."""
    set_schedule("eager")
    poison_free_memory()
    model = compiled(layers, tuple(sorted(options.items())))
    ids = prompt(PROMPT + more + steps, seed=5).cuda()
    places = torch.arange(ids.shape[1], device="cuda")[None]
    set_schedule(schedule)
    out = model(ids[:, :PROMPT], use_cache=True)
    cache, logits = cache_of(out), [out.logits[:, -1]]
    if more:
        logits.append(feed(model, cache, ids[:, PROMPT : PROMPT + more], places[:, PROMPT : PROMPT + more]))
    for step in range(PROMPT + more, ids.shape[1]):
        logits.append(feed(model, cache, ids[:, step : step + 1], places[:, step : step + 1]))
    assert not options.get("mode") or sc.stats(model).replays > 0
    return result_of(cache, logits)


def differences(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> list[str]:
    """Return the names of results that differ in any bit."""
    assert some["logits"].isfinite().all()
    return [name for name in some if not torch.equal(some[name], others[name])]
