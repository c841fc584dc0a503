"""Decode throughput on a GPU: specache, its modes and baselines, in one run.

    python benchmarks/gpu_decode.py    (hours; --resume, --contexts 32768 --caps 48, --smoke on any machine)

Weights are random, and caches are filled with random pairs up to each context. The share of pairs that a step fetches
is set by --reuse and --corrected. `specache bench` times Hugging Face's caches. Exit status 1: a step was not captured
as a CUDA graph although it could be.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from computed_steps import traced
from measuring import limits, milliseconds, parsed, parser_of
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import specache_compile as sc
from specache_compile.bench.results import Results
from specache_compile.compat import cache_of, with_cache
from specache_compile.explaining.times.devices import DEVICES, Device
from specache_compile.explaining.times.step_kernels import Traced
from specache_compile.explaining.times.step_time import step_of
from specache_compile.explaining.times.workload import CORRECTED
from specache_compile.kernels.state.page_table import PAGE
from specache_compile.lowering.cuda_graphs import MODES
from specache_compile.methods import parse_options
from specache_compile.methods.field import LayerShape
from specache_compile.options import own_options
from specache_compile.runtime.break_even import word_of
from specache_compile.runtime.session import Session
from specache_compile.runtime.state import device_total, predicted_bytes

GIB = 1 << 30
LLAMA = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
MODELS = {
    "llama-3-8b": LLAMA,
    "smoke": {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip
SPECACHE: dict[str, dict[str, Any]] = {
    "16 bits, k = 0": {"setting": "paper", "bits": 16, "top_k": 0, "speculate": False, "host_tier": False},
    "specache 2-bit": {"setting": "paper", "bits": 2},
    "specache best": {},
    "specache best, two lanes": {"speculate": True},
    "kivi 2-bit": {"method": "kivi", "bits": 2, "host_tier": False},
    "fp8": {"method": "fp8"},
}
METHODS = list(SPECACHE)
# Bytes of VRAM beside the margin, in which the smoke model and three sequences fit, by their dtypes there.
SMOKE_ROOM = {"cuda": 1 << 19, "cpu": 1 << 20}
# Tokens that a forced context has room to grow by.
STEPS = 80
# What a step needs beside weights and cache: logits, activations, the allocator's slack.
MARGIN = 2 * GIB


@dataclass(frozen=True)
class Case:
    """One cell of the table.

    cap: bytes of VRAM.
    reuse: the share of a fetch's pairs that are in the slots already.
    corrected: the share of the slots that a correction then replaces.
    """

    model: str
    method: str
    context: int
    cap: int
    reuse: float
    corrected: float = 0.0


def build(name: str, device: torch.device) -> LlamaForCausalLM:
    """Random weights, made on the device."""
    config = LlamaConfig(**MODELS[name], max_position_embeddings=1 << 20, bos_token_id=None, eos_token_id=None)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
        model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    return model


def shapes_of(model: LlamaForCausalLM) -> list[LayerShape]:
    c = model.config
    shape = LayerShape(c.num_key_value_heads, c.hidden_size // c.num_attention_heads, model.dtype, model.device)
    return [shape] * c.num_hidden_layers


def sequence_bytes(model: LlamaForCausalLM, case: Case) -> tuple[int, int]:
    """Bytes of one sequence's cache on the device, with what a step puts beside it, and on the host."""
    tiers = predicted_bytes(parse_options(SPECACHE[case.method]), shapes_of(model), 1, case.context + STEPS)
    return device_total(tiers), tiers["host"]


def largest_batch(model: LlamaForCausalLM, case: Case, host: float) -> int:
    """How many sequences fit beside the weights, in VRAM and in the host's budget; 0 if none does."""
    weights = sum(p.nbytes for p in model.parameters())
    device, pinned = sequence_bytes(model, case)
    fit = (case.cap - weights - MARGIN) // device
    return max(0, min(fit, int(host // pinned) if pinned else fit))


class NotCaptured(Exception):
    """A step is not a CUDA graph although the mode requires one."""


class Decoder:
    """A method with a cache of `batch` forced contexts; `step()` decodes a token for each. `host`: bytes to pin."""

    def __init__(self, model: LlamaForCausalLM, case: Case, batch: int, mode: str, host: int) -> None:
        self.case, self.batch, self.device = case, batch, model.device
        self.model = copy.copy(model)
        self.model.__dict__ = dict(model.__dict__)
        self.token = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self.length = case.context
        lowering = "inductor" if self.device.type == "cuda" else "eager"
        given = SPECACHE[case.method]
        settings = {"mode": mode, "min_context": 0, "lowering": lowering, "host_memory": host}
        taken = own_options(type(parse_options(given)))
        settings = {name: value for name, value in settings.items() if name in taken}
        self.model.compile(backend="specache", options={**given, **settings})
        self.cache = forced_session(self.model, self.token, case.context)

    def step(self) -> None:
        place = torch.full((self.batch, 1), self.length, device=self.device)
        out = self.model(self.token, **with_cache(self.cache), position_ids=place, use_cache=True)
        self.token = out.logits[:, -1:].argmax(-1)
        self.length += 1


def forced_session(model: LlamaForCausalLM, token: Tensor, context: int) -> Any:
    """A cache that the backend made, lengthened to `context` random tokens, the same in every run."""
    torch.manual_seed(0)
    cache = cache_of(model(token.repeat(1, 2), use_cache=True))
    session: Session = cache.layers[0].keys.handle.session
    session.reserve(context + STEPS - session.length)
    for layer in session.state:
        for field, tensor in layer.items():
            if tensor.dtype == torch.uint8:
                tensor.random_(0, 256 if field == "codes" else 120)  # scales are numbers then, up to 1
            elif field == "host":  # what is fetched must be numbers; of these there are too many to draw
                tensor[: session.tiers.pool.backed].fill_(0.5)
            elif field == "sink_index":
                tensor.copy_(torch.arange(tensor.shape[2]))
            elif field in ("codes", "key_params", "value_params", "sink_pairs", "recent"):
                tensor.normal_()
    session.progress.length, session.progress.lengths = context, (context,) * session.tiers.batch
    session.version += 1
    for number, layer in enumerate(cache.layers):
        layer.keys, layer.values = session.held(number, "keys"), session.held(number, "values")
    return cache


@contextmanager
def as_it_is_called(case: Case, device: torch.device) -> Iterator[None]:
    """A context in which fetches copy the share of the case."""
    if device.type != "cuda":
        yield
        return
    from specache_compile.kernels.movement import triton_copy

    forced = forced_gather(triton_copy.gather, case.reuse, case.corrected)
    with mock.patch.object(triton_copy, "gather", forced):
        yield


def forced_gather(gather: Callable[..., None], reuse: float, corrected: float) -> Callable[..., None]:
    """A gather that leaves a share of the slots as they are, `reuse` or, of a correction's, 1 - `corrected`, and brings
    new pairs to the others. What the real selection has chosen is chosen, and left.

    Two small kernels more than the real one: each further one would cost its launch once a layer in every step.
    """
    turns: dict[tuple[int, bool], tuple[Tensor, ...]] = {}

    def forced(
        selected: Tensor, cursor: Tensor, host: Tensor, slots: Tensor, slot_index: Tensor, traffic: Tensor, **grid: Any
    ) -> None:
        corrects = "programs" in grid  # a grid of its own is a correction's
        key = slots.data_ptr(), corrects
        if key not in turns:  # in the first step, which is not captured
            turns[key] = two_turns(host, slot_index, corrects, 1 - corrected if corrects else reuse)
            selected = turns[key][0].expand_as(slot_index).contiguous()  # fills all slots
        else:
            tokens, both, stay = turns[key]
            torch.sub(both, tokens, out=tokens)
            selected = torch.where(stay, slot_index, tokens)
        gather(selected, cursor, host, slots, slot_index, traffic, **grid)

    return forced


def two_turns(host: Tensor, slot_index: Tensor, corrects: bool, stays: float) -> tuple[Tensor, ...]:
    """The tokens [k] of one turn, their sum with the other turn's, and which slots [k] stay as they are.

    An eighth of the places for each turn of a fetch and of a correction: no pair is there before it is brought.
    """
    k, places = slot_index.shape[-1], len(host) * PAGE // len(slot_index)
    eighth = places // 8
    assert k <= eighth, f"{places} places are too few for {k} pairs a turn"
    number = torch.arange(k, device=slot_index.device, dtype=slot_index.dtype)
    first = number * (eighth // k) + 2 * eighth * corrects
    return first, 2 * first + eighth, number < round(stays * k)


def share_corrected(method: str, given: float | None) -> float:
    """The share of the slots that the method's corrections replace: the given one, or the measured one."""
    options = parse_options(SPECACHE[method])
    if not options.corrects:
        return 0.0
    return CORRECTED[1 + options.two_lanes] if given is None else given


def measure(model: LlamaForCausalLM, case: Case, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a step, peak memory, and bytes over PCIe a step, at one batch size."""
    device = model.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    required = device.type == "cuda" and args.mode in MODES
    with as_it_is_called(case, device), warnings.catch_warnings(record=True, action="always") as logged:
        decoder = Decoder(model, case, batch, args.mode, round(args.host_gib * GIB))
        for _ in range(args.warm_up):
            decoder.step()
        before = sc.stats(decoder.model)
        ms = milliseconds(lambda i: decoder.step(), device, args.steps)
    messages = dict.fromkeys(str(w.message) for w in logged if issubclass(w.category, UserWarning))
    after = sc.stats(decoder.model)
    steps = after.decodes - before.decodes
    if required and after.replays - before.replays != steps:
        raise NotCaptured(f"{after.replays - before.replays} of {steps} steps were replays: {'; '.join(messages)}")
    for message in messages:
        tqdm.write(f"{case.method}: {message}", file=sys.stderr)
    row: dict[str, Any] = {
        "batch": batch, "ms": ms, "tokens/s": 1e3 * batch / ms, "captured": required,
        "bytes to device": (after.bytes_to_device - before.bytes_to_device) / steps,
        "bytes to host": (after.bytes_to_host - before.bytes_to_host) / steps,
        "pinned bytes": after.host_bytes,
    }  # fmt: skip
    if device.type == "cuda":
        row["peak bytes"] = torch.cuda.max_memory_allocated(device)
    return row


def roofline_share(model: LlamaForCausalLM, case: Case, row: dict[str, Any], limit: dict[str, float]) -> float:
    """The floor of the step over its time: weights and device tiers at copy bandwidth, fetches at the link's."""
    weights = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    hbm = weights + row["batch"] * sequence_bytes(model, case)[0]
    floor = max(hbm / limit["copy"], row.get("bytes to device", 0) / limit["to device"]) / 1e6
    return floor / row["ms"]


def device_called(name: str) -> Device | None:
    """The device of CUDA's name, if it is a whole one; None where its figures are not known."""
    by_word = {key.split()[-1]: device for key, device in DEVICES.items()}
    word = word_of(name, by_word)
    return None if word is None else by_word[word]


def simulated_ms(case: Case, batch: int, device: Device | None) -> float | None:
    """What `explain` computes for a step of Llama-3-8B; None for other models."""
    if device is None or case.model != "llama-3-8b":
        return None
    return 1e3 * step_of(traced_as(case.method), device, case.context, batch).seconds


@functools.cache
def traced_as(method: str) -> Traced:
    return traced(SPECACHE[method])


def run_case(
    model: LlamaForCausalLM, case: Case, args: argparse.Namespace, limit: dict[str, float], results: Results
) -> None:
    """A method at batch 1 and at its largest batch; a batch that does not fit is retried with a tenth less. What the
    results have is not measured again."""
    device = model.device
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, case.cap / total), device)
    batches = {"1": 1, "largest": largest_batch(model, case, args.host_gib * GIB)}
    for kind, batch in batches.items():
        if results.find(**vars(case), at=kind):
            continue
        while batch:
            had = results.find(**vars(case), batch=batch)
            row, lost = measured_or_none(model, case, batch, args) if not had else (had[0], None)
            if lost is not None:
                results.report.setdefault("not captured", []).append({**vars(case), "batch": batch, "why": lost})
                results.write()
                return
            if row is not None:
                share = roofline_share(model, case, row, limit)
                simulated = simulated_ms(case, batch, device_called(results.report["provenance"]["device"]))
                results.add({**vars(case), **row, "roofline share": share, "simulated ms": simulated, "at": kind})
                break
            batch = batch * 9 // 10


def measured_or_none(
    model: LlamaForCausalLM, case: Case, batch: int, args: argparse.Namespace
) -> tuple[dict[str, Any] | None, str | None]:
    """The row, None where memory is too small, and why its steps were not captured."""
    row, lost = None, None
    try:
        row = measure(model, case, batch, args)
    except torch.OutOfMemoryError:
        pass
    except NotCaptured as reason:
        lost = str(reason)
    # Behind the handlers: within them the traceback still holds the cache.
    torch._dynamo.reset()
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return row, lost


def break_even(rows: list[dict[str, Any]], method: str = "specache best") -> int | None:
    """The shortest measured context from which on a method's step at batch 1 is as fast as our 16-bit one."""
    alone = [row for row in rows if row["batch"] == 1]
    least: int | None = None
    for context in sorted({row["context"] for row in alone}, reverse=True):
        ms = {row["method"]: row["ms"] for row in alone if row["context"] == context}
        if not {method, "16 bits, k = 0"} <= ms.keys() or ms[method] > ms["16 bits, k = 0"]:
            break
        least = context
    return least


def cases_of(args: argparse.Namespace, total: int) -> list[Case]:
    caps = dict.fromkeys(min(total, round(cap * 1e9)) if cap else total for cap in args.caps)
    return [
        Case(args.model, method, context, cap, args.reuse, share_corrected(method, args.corrected))
        for context in args.contexts
        for cap in caps
        for method in args.methods
    ]


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, torch.device]:
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b")
    parser.add_argument("--contexts", type=int, nargs="+", default=[32768, 8192, 131072], help="tokens")
    parser.add_argument("--caps", type=float, nargs="+", default=[48, 0], help="GB of VRAM; 0: all (48 0)")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=METHODS, metavar="NAME", help=f"(all) {'; '.join(METHODS)}"
    )
    parser.add_argument("--reuse", type=float, default=0.5, help="share of the slots that stay (0.5)")
    parser.add_argument(
        "--corrected", type=float, metavar="SHARE", help="of the slots that a correction fills (.44; two lanes: .34)"
    )
    parser.add_argument("--mode", default="reduce-overhead", help="torch.compile's (default: reduce-overhead)")
    parser.add_argument("--host-gib", type=float, default=100.0, help="pinned memory that may be used (100)")
    parser.add_argument("--steps", type=int, default=50, help="timed steps (50)")
    parser.add_argument("--warm-up", type=int, default=8, help="steps before them (8)")
    args, device = parsed(parser, "gpu_decode", arguments)
    if args.steps + args.warm_up + 4 > STEPS:
        parser.error(f"--steps and --warm-up together: at most {STEPS - 4}, for which the caches have room")
    if args.smoke:
        args.model, args.contexts, args.caps = "smoke", [320], [0]
        args.steps, args.warm_up, args.host_gib = 2, 1, 1 / 1024
    return args, device


def main(arguments: list[str] | None = None) -> int:
    args, device = parse(arguments)
    total = MARGIN + SMOKE_ROOM[device.type] if args.smoke else torch.cuda.get_device_properties(device).total_memory
    settings = {name: getattr(args, name) for name in ("smoke", "mode", "host_gib", "steps")}
    results = Results(args.out, "benchmarks/gpu_decode.py", device, args.resume, **settings)
    limit = results.once("limits", lambda: limits(device, 1 << (20 if args.smoke else 30), 20))
    results.report["not captured"] = []
    try:
        with torch.no_grad(), tqdm(cases_of(args, total), file=sys.stderr) as bar:
            model = build(args.model, device)
            for case in bar:
                bar.set_postfix_str(f"{case.method} at {case.context}")
                run_case(model, case, args, limit, results)
    except KeyboardInterrupt:
        print("interrupted: the cases below are finished", file=sys.stderr)
    results.write()
    print(tabulate(results.rows, headers="keys", floatfmt=",.2f"))
    least = None if args.smoke else break_even(results.rows)
    print(f"break-even at batch 1 (for specache_compile/runtime/break_even.py): {least or 'none measured'}")
    for lost in results.report["not captured"]:
        where = f"{lost['method']}, {lost['context']:,} tokens, batch {lost['batch']}"
        print(f"NOT CAPTURED, so not timed: {where}: {lost['why']}")
    return 1 if results.report["not captured"] else 0


if __name__ == "__main__":
    sys.exit(main())
