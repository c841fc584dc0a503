"""What a prefill costs: specache beside plain torch.compile, its time and its peak memory, in one run.

Random weights of Llama-3-8B shape in bfloat16, one sequence. The offload runs behind compute through two buffers, so
that time should grow by a tenth at most, and the peak should hold two layers' 16-bit pairs beside weights, activations
and the tiers that stay. The host tier's pinned memory is that of the prefill before, as in a process that goes on; the
very first one, which is not timed, pays for its pinning.

    python benchmarks/gpu_prefill.py                 8k and 32k, into benchmarks/results/gpu_prefill.json
    python benchmarks/gpu_prefill.py --smoke         tiny, on any machine: figures mean nothing
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
from pathlib import Path
from typing import Any

import torch
from gpu_decode import GIB, build, shapes_of
from measuring import milliseconds, provenance
from tabulate import tabulate
from transformers import LlamaForCausalLM

from specache_compile.methods import parse_options
from specache_compile.runtime.state import full_cache_bytes, predicted_bytes

METHODS: dict[str, dict[str, Any] | None] = {
    "torch.compile": None,
    "specache 2-bit": {"setting": "paper", "bits": 2, "min_context": 0},
    "specache 1-bit": {"setting": "paper", "bits": 1, "min_context": 0},
}


def prepare(model: LlamaForCausalLM, method: str) -> LlamaForCausalLM:
    """The same weights, compiled this way."""
    twin = copy.copy(model)
    twin.__dict__ = dict(model.__dict__)
    options = METHODS[method]
    smoke = model.device.type != "cuda"  # nothing compiled to C++
    if options is None:
        twin.compile(backend="eager" if smoke else "inductor")
    else:
        twin.compile(backend="specache", options=options | ({"lowering": "eager"} if smoke else {}))
    return twin


def measure(model: LlamaForCausalLM, method: str, context: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of a prefill, and the peak of device memory beyond what was there before it."""
    ids = torch.randint(0, model.config.vocab_size, (1, context), device=model.device)
    twin = prepare(model, method)

    def prefill(i: int) -> None:
        twin(ids, use_cache=True, logits_to_keep=1)

    ms = milliseconds(prefill, model.device, repeats)
    row = {"method": method, "context": context, "ms": ms, **expected_bytes(model, method, context)}
    if model.device.type == "cuda":
        gc.collect()
        before = torch.cuda.memory_allocated(model.device)
        torch.cuda.reset_peak_memory_stats(model.device)
        prefill(0)
        row["peak bytes"] = torch.cuda.max_memory_allocated(model.device) - before
    torch._dynamo.reset()
    return row


def expected_bytes(model: LlamaForCausalLM, method: str, context: int) -> dict[str, int]:
    """What the prefill must hold at its end: the whole cache, or the device tiers and two layers' pairs."""
    layers = shapes_of(model)
    options = METHODS[method]
    if options is None:
        return {"expected bytes": full_cache_bytes(layers, 1, context)}
    tiers = predicted_bytes(parse_options(options), layers, 1, context)
    device = sum(size for tier, size in tiers.items() if tier != "host")
    return {"expected bytes": device + full_cache_bytes(layers[:2], 1, context)}


def table(rows: list[dict[str, Any]]) -> str:
    plain = {row["context"]: row for row in rows if row["method"] == "torch.compile"}
    lines = [
        (
            f"{row['context']:,}", row["method"], f"{row['ms']:.1f}", f"{row['ms'] / plain[row['context']]['ms']:.2f}",
            f"{row['expected bytes'] / GIB:.2f}", f"{row.get('peak bytes', 0) / GIB:.2f}",
        )
        for row in rows
    ]  # fmt: skip
    headers = ("context", "", "ms", "of torch.compile's", "KV GiB expected", "peak GiB, with activations")
    return tabulate(lines, headers, disable_numparse=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768], help="tokens (8192 32768)")
    parser.add_argument("--repeats", type=int, default=10, help="timed prefills of each (10)")
    parser.add_argument("--smoke", action="store_true", help="tiny, to see that everything runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_prefill.json")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not args.smoke:
        parser.error("no CUDA device: only --smoke runs here")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.smoke:
        args.contexts, args.repeats = [256], 1
    rows = []
    with torch.no_grad():
        model = build("smoke" if args.smoke else "llama-3-8b", device)
        for context in args.contexts:
            rows += [measure(model, method, context, args.repeats) for method in METHODS]
    print(table(rows))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"provenance": provenance(device, "benchmarks/gpu_prefill.py"), "rows": rows}
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
