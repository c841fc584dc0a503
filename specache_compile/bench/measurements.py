"""Measure decode steps of all runners in rounds, further tokens after a context, and first tokens."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from specache_compile.compat import with_cache
from specache_compile.evaluation.settings import UNCOMPILED
from specache_compile.runtime.records import forget

from .runners import COMPILED, Decoding, Prefilled, can_extend, empty_cache, prefill, runner, twin_of

# Steps before the timed ones. They compile graphs, also for the lengths that follow.
WARM_UP = 6
# Consecutive steps of a runner: few, so that a busy second of the machine affects all runners alike.
IN_A_ROW = 5
# Methods that store every pair in the model's dtype.
FULL = (COMPILED, UNCOMPILED, "full")
# Timed calls with several tokens after the context; one untimed call before them compiles.
EXTENSIONS = 3


@dataclass(frozen=True)
class BenchPlan:
    """The measurements of a cell.

    methods: the runners' names.
    rounds: turns of each runner.
    prompts: whether first tokens are timed.
    extend: tokens of a further timed call after the context; 0: no call.
    lowering: the lowering of this backend.
    """

    methods: tuple[str, ...]
    rounds: int
    lowering: str
    prompts: bool = False
    extend: int = 0


def steps_behind(rounds: int) -> int:
    """The number of tokens that each runner decodes after a context."""
    return WARM_UP + rounds * IN_A_ROW + 1


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(run: Callable[[], Any], device: torch.device) -> float:
    """The seconds that `run` takes."""
    synchronise(device)
    start = time.perf_counter()
    run()
    synchronise(device)
    return time.perf_counter() - start


def spread(values: Sequence[float]) -> tuple[float, list[float]]:
    """The median, and the ends of the middle half."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, [low, high]


def cell(model: Any, context: int, batch: int, plan: BenchPlan, bar: tqdm) -> list[dict[str, Any]]:
    """A row for each method at one context of random tokens and one batch size, all measured in turn."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (batch, context), generator=generator)
    show = bar.set_postfix_str
    prefilled = prefill(model, ids.to(model.device), lambda done: show(f"prefill, {done}"))
    return measured(model, [prefilled], plan, bar)


def measured(
    model: Any, prefills: Sequence[Prefilled], plan: BenchPlan, bar: tqdm,
    answer: Callable[[int, Decoding], dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each method after the first prefilled context.

    answer: (the number of a context, a runner) → the row's answer; None: no answers.
    """
    first, room = prefills[0], steps_behind(plan.rounds)
    batch, context = first.ids.shape
    twins = {name: twin_of(model, name, plan.lowering) for name in plan.methods}
    runners: dict[str, Decoding] = {}
    answers: dict[str, list[dict[str, Any]]] = {}
    # Dynamo traces the model's code once for each runner.
    with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=4096):
        for number, name in enumerate(plan.methods, 1):
            bar.set_postfix_str(f"{name} ({number} of {len(plan.methods)}) at {context:,} tokens, compiling")
            runners[name] = runner(name, twins[name], first, room)
            for _ in range(WARM_UP):
                runners[name].step()
            bar.update()
            if answer is not None:
                bar.set_postfix_str(f"{name}, {len(prefills)} answers")
                after = (runner(name, twins[name], prefilled, room) for prefilled in prefills)
                answers[name] = [answer(number, one) for number, one in enumerate(after)]
                bar.update()
        prompt = first.ids
        del prefills, first
        steps = steps_in_turn(runners, model.device, plan.rounds, context, bar)
        rows = {name: row_of(runners[name], steps[name]) for name in plan.methods}
        add_shares(rows, runners)
        for name, found in answers.items():
            rows[name]["keys"] = found
        if plan.extend:
            for name, seconds in extensions_in_turn(runners, prompt[:, : plan.extend], bar).items():
                rows[name] |= {"extend": plan.extend, "extend_ms": 1e3 * seconds}
        runners.clear()
        gc.collect()
        for name in plan.methods if plan.prompts else ():
            bar.set_postfix_str(f"{name} at {context:,} tokens, the first token")
            rows[name] |= first_and_second(name, twins[name], prompt, room)
            bar.update()
    torch._dynamo.reset()
    forget(model)
    return [{"method": name, "context": context, "batch": batch, **row} for name, row in rows.items()]


def add_shares(rows: Mapping[str, dict[str, Any]], runners: Mapping[str, Decoding]) -> None:
    """Add each cache's share of the full 16-bit cache's bytes, if both are known."""
    whole = next((runners[name] for name in FULL if name in runners), None)
    for name, one in runners.items():
        if whole is not None and can_extend(name):
            rows[name]["of_16_bits"] = one.bytes_in_16_bits() / whole.bytes_in_16_bits()


def steps_in_turn(
    runners: Mapping[str, Decoding], device: torch.device, rounds: int, context: int, bar: tqdm
) -> dict[str, list[float]]:
    """Milliseconds of each runner's steps. Turns spread a busy second of the machine evenly."""
    steps: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(rounds):
        bar.set_postfix_str(f"steps at {context:,} tokens, round {number + 1} of {rounds}")
        for name, one in runners.items():
            one.step()  # untimed: the processor's caches hold the other runners' data
            steps[name] += [1e3 * timed(one.step, device) for _ in range(IN_A_ROW - 1)]
        bar.update()
    return steps


def extensions_in_turn(runners: Mapping[str, Decoding], ids: Tensor, bar: tqdm) -> dict[str, float]:
    """Median seconds to append `ids` [B, T] to the context, for runners that support it. The first call compiles."""
    found: dict[str, list[float]] = {}
    for number in range(1 + EXTENSIONS):
        for name, one in runners.items():
            if can_extend(name):
                bar.set_postfix_str(f"{name}, {ids.shape[1]:,} tokens more")
                seconds = timed(one.extension(ids), ids.device)
                found.setdefault(name, []).extend([seconds] if number else [])
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def row_of(one: Decoding, steps: list[float]) -> dict[str, Any]:
    middle, half = spread(steps)
    on_device, on_host = one.bytes()
    return {
        "step_ms": middle, "step_ms_half": half, "steps": len(steps), "device_bytes": on_device, "host_bytes": on_host,
    }  # fmt: skip


@torch.no_grad()
def first_and_second(name: str, twin: Any, ids: Tensor, room: int) -> dict[str, Any]:
    """Seconds to prefill `ids` [B, n] into an empty cache, and to decode a token after it, once both are compiled.

    On a GPU also the prefill's peak memory above what was allocated before.
    """
    device, found = twin.device, dict[str, Any]()
    places = torch.arange(ids.shape[1] + 1, device=ids.device).expand(len(ids), -1)
    for _ in range(2):
        call = partial(twin, **with_cache(empty_cache(name, twin.config, ids.shape[1] + room)), use_cache=True)
        first = partial(call, ids, position_ids=places[:, :-1], logits_to_keep=1)  # frees the cache of the first turn
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        found["first_token_s"] = timed(first, device)
        if device.type == "cuda":
            found["prefill_peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
        found["second_token_s"] = timed(partial(call, ids[:, -1:], position_ids=places[:, -1:]), device)
    return found
