"""The measurements: decode steps in turn, by rounds; first tokens; first answers of new processes."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from specache_compile.evaluation.reader import Reader
from specache_compile.evaluation.settings import UNCOMPILED
from specache_compile.evaluation.tasks.needle import CHAT_ANSWER
from specache_compile.evaluation.tasks.task import Ask
from specache_compile.runtime.records import forget

from .floor import floor, synchronise, weight_bytes
from .keys import answered
from .llama_cpp import LLAMA_CPP, LlamaCpp
from .profile import KERNELS_SHOW, PROFILED, profiled
from .ways import COMPILED, Decoding, Prefill, Way, can_extend, first_tokens, read, twin_of, way

# Steps before the timed ones. They compile graphs, also for the lengths that follow.
WARM_UP = 6
# Steps in a row of a way that has its turn: few, so that a busy second of the machine affects all ways alike.
IN_A_ROW = 5
# Methods that keep every pair in the model's dtype.
FULL = (COMPILED, UNCOMPILED, "full")
# Timed calls of several tokens behind the context, and one before them that compiles.
EXTENSIONS = 3


@dataclass(frozen=True)
class Plan:
    """What is measured.

    rounds: turns of each way.
    prompts: whether first tokens are timed too.
    extend: tokens of a call behind the context that is timed too; 0: none.
    profile: whether a step is profiled too.
    lowering: this backend's.
    gguf: llama.cpp's file.
    rate: bytes a second that the device reads; 0: no floor is computed.
    in_a_row: steps of a turn; behind many a processor's caches hold what they hold within a text.
    """

    methods: tuple[str, ...]
    rounds: int
    prompts: bool
    extend: int
    profile: bool
    lowering: str
    gguf: Path | None
    rate: float
    in_a_row: int = IN_A_ROW


def steps_behind(rounds: int, in_a_row: int = IN_A_ROW) -> int:
    """The number of tokens that each way decodes behind a context."""
    return WARM_UP + rounds * in_a_row + PROFILED + 1


def timed(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds that `run` takes."""
    synchronise(device)
    start = time.perf_counter()
    run()
    synchronise(device)
    return time.perf_counter() - start


def spread(values: Sequence[float]) -> tuple[float, list[float]]:
    """The median, and the ends of the middle half."""
    if len(values) < 2:
        return values[0], [values[0], values[0]]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, [low, high]


def cell(model: Any, context: int, batch: int, plan: Plan, bar: tqdm) -> list[dict[str, Any]]:
    """A row for each method at one context of random tokens and one batch size, all measured in turn."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (batch, context), generator=generator)
    tell = bar.set_postfix_str
    prefill = read(model, ids.to(model.device), lambda done: tell(f"prefill, {done}"))
    return measured(model, [prefill], plan, bar)


def key_search(model: Any, reader: Reader, asks: Sequence[Ask], plan: Plan, bar: tqdm) -> list[dict[str, Any]]:
    """As `cell`, behind the first of the prompts; each row also has the answers to all of them ("keys")."""
    prefills = []
    for number, ask in enumerate(asks, 1):
        ids = torch.tensor([list(ask.prompt)], device=model.device)
        name = f"prefill of prompt {number} of {len(asks)}"
        prefills.append(read(model, ids, functools.partial(progress, bar, name)))
        bar.update()
    return measured(model, prefills, plan, bar, lambda number, one: answered(asks[number], one, reader))


def progress(bar: tqdm, name: str, done: str) -> None:
    bar.set_postfix_str(f"{name}, {done}")


def measured(
    model: Any, prefills: Sequence[Prefill], plan: Plan, bar: tqdm,
    ask: Callable[[int, Decoding], dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each method behind the first prefill.

    ask: the answer of a way behind a prefill, given by its number; None: none is asked for.
    """
    first, room = prefills[0], max(CHAT_ANSWER, steps_behind(plan.rounds, plan.in_a_row))
    batch, context = first.ids.shape
    inductor = KERNELS_SHOW if plan.profile else {}
    twins = {name: twin_of(model, name, plan.lowering, inductor) for name in plan.methods}
    ways: dict[str, Way] = {}
    answers: dict[str, list[dict[str, Any]]] = {}
    with many_graphs():
        for number, name in enumerate(plan.methods, 1):
            bar.set_postfix_str(f"{name} ({number} of {len(plan.methods)}) at {context:,} tokens, compiling")
            if name in LLAMA_CPP:
                assert plan.gguf is not None
                ways[name] = LlamaCpp(name, plan.gguf, first.ids[0].tolist(), room)
            else:
                ways[name] = way(name, twins[name], first, room)
            for _ in range(WARM_UP):
                ways[name].step()
            bar.update()
            if ask is not None:
                bar.set_postfix_str(f"{name}, {len(prefills)} answers")
                behind = (way(name, twins[name], prefill, room) for prefill in prefills)
                answers[name] = [ask(number, one) for number, one in enumerate(behind)]
                bar.update()
        prompt = first.ids
        del prefills, first
        steps = steps_in_turn(ways, model.device, plan.rounds, context, bar, plan.in_a_row)
        rows = {name: row_of(name, ways[name], steps[name], model, plan) for name in plan.methods}
        add_shares(rows, ways)
        for name, found in answers.items():
            rows[name]["keys"] = found
        if plan.extend:
            for name, seconds in extensions_in_turn(ways, prompt[:, : plan.extend], bar).items():
                rows[name] |= {"extend": plan.extend, "extend_ms": 1e3 * seconds}
        for name in plan.methods if plan.profile else ():
            bar.set_postfix_str(f"{name} at {context:,} tokens, a profile")
            rows[name]["profile"] = profiled(ways[name].step)
        ways.clear()
        gc.collect()
        for name in plan.methods if plan.prompts else ():
            bar.set_postfix_str(f"{name} at {context:,} tokens, the first token")
            if name not in LLAMA_CPP:
                rows[name] |= first_and_second(name, twins[name], prompt, room)
            bar.update()
    torch._dynamo.reset()
    forget(model)
    return [{"method": name, "context": context, "batch": batch, **row} for name, row in rows.items()]


def add_shares(rows: Mapping[str, dict[str, Any]], ways: Mapping[str, Way]) -> None:
    """Add each cache's share of the full 16-bit cache's bytes, where both are known."""
    whole = next((one for name in FULL if isinstance(one := ways.get(name), Decoding)), None)
    for name, one in ways.items():
        if whole is not None and isinstance(one, Decoding) and can_extend(name):
            rows[name]["of_16_bits"] = one.bytes_in_16_bits() / whole.bytes_in_16_bits()


def steps_in_turn(
    ways: Mapping[str, Way], device: torch.device, rounds: int, context: int, bar: tqdm, in_a_row: int = IN_A_ROW
) -> dict[str, list[float]]:
    """Milliseconds of each way's steps. In turns, a busy second of the machine affects all ways alike."""
    steps: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        bar.set_postfix_str(f"steps at {context:,} tokens, round {number + 1} of {rounds}")
        for name, one in ways.items():
            one.step()  # untimed: the processor's caches hold the other ways' data
            steps[name] += [1e3 * timed(one.step, device) for _ in range(in_a_row - 1)]
        bar.update()
    return steps


def extensions_in_turn(ways: Mapping[str, Way], ids: Tensor, bar: tqdm) -> dict[str, float]:
    """Seconds, a median, of each way that can to read `ids` [B, T] behind the context; the first call compiles."""
    found: dict[str, list[float]] = {}
    for number in range(1 + EXTENSIONS):
        for name, one in ways.items():
            if can_extend(name) and isinstance(one, Decoding):
                bar.set_postfix_str(f"{name}, {ids.shape[1]:,} tokens more")
                seconds = timed(one.extension(ids), ids.device)
                found.setdefault(name, []).extend([seconds] if number else [])
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def row_of(name: str, one: Way, steps: list[float], model: Any, plan: Plan) -> dict[str, Any]:
    middle, half = spread(steps)
    on_device, on_host = one.bytes()
    row: dict[str, Any] = {
        "step_ms": middle, "step_ms_half": half, "steps": len(steps), "device_bytes": on_device, "host_bytes": on_host,
    }  # fmt: skip
    if name in LLAMA_CPP or not plan.rate:  # llama.cpp has weights of its own
        return row
    least = floor(weight_bytes(model), on_device, plan.rate)
    return {**row, "floor_ms": least, "of_floor": middle / least}


def many_graphs() -> Any:
    """Within it Dynamo traces the model's code once for each way to run it."""
    return torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=4096)


def first_and_second(name: str, twin: Any, ids: Tensor, room: int) -> dict[str, Any]:
    """Seconds to the first token, and from it to the second, with everything compiled."""
    with torch.no_grad():
        for _ in range(2):
            prefill, decode = first_tokens(name, twin, ids, room)
            seconds = timed(prefill, twin.device), timed(decode, twin.device)
    return {"first_token_s": seconds[0], "second_token_s": seconds[1]}
