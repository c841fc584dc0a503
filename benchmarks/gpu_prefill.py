"""Time and peak memory of a prefill: specache and plain torch.compile.

    python benchmarks/gpu_prefill.py    (8k and 32k tokens; --smoke: tiny shapes on any machine)

Weights are random, in Llama-3-8B's shape and bfloat16. The targets: at most a tenth more time than torch.compile, and
a peak below the prediction of `explain`. The first, untimed prefill pins the host memory.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
from gpu_decode import GIB, build
from measuring import milliseconds, parsed, parser_of
from tabulate import tabulate
from transformers import LlamaForCausalLM

import specache_compile as sc
from specache_compile.bench.results import Results

METHODS: dict[str, dict[str, Any] | None] = {
    "torch.compile": None,
    "specache best": {"min_context": 0},
    "specache 2-bit": {"setting": "paper", "bits": 2, "min_context": 0},
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
    row = {"method": method, "context": context, "ms": ms, "predicted bytes": predicted_bytes(model, method, context)}
    if model.device.type == "cuda":
        gc.collect()
        before = torch.cuda.memory_allocated(model.device)
        torch.cuda.reset_peak_memory_stats(model.device)
        prefill(0)
        row["peak bytes"] = torch.cuda.max_memory_allocated(model.device) - before
    torch._dynamo.reset()
    return row


def predicted_bytes(model: LlamaForCausalLM, method: str, context: int) -> int:
    """The prefill's peak memory as predicted by `explain`; for a plain model, with the whole cache on the device."""
    options = METHODS[method] or {"method": "full"}
    return sc.explain(model, context, 1, options).prefill_bytes


def table(rows: list[dict[str, Any]]) -> str:
    plain = {row["context"]: row["ms"] for row in rows if row["method"] == "torch.compile"}
    lines = [
        (
            f"{row['context']:,}", row["method"], f"{row['ms']:.1f}",
            f"{row['ms'] / plain[row['context']]:.2f}" if row["context"] in plain else "",
            f"{row['predicted bytes'] / GIB:.2f}", f"{row.get('peak bytes', 0) / GIB:.2f}",
        )
        for row in rows
    ]  # fmt: skip
    headers = ("context", "", "ms", "of torch.compile's", "GiB predicted", "peak GiB")
    return tabulate(lines, headers, disable_numparse=True)


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768], help="tokens (8192 32768)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="(all)")
    parser.add_argument("--repeats", type=int, default=10, help="timed prefills of each (10)")
    args, device = parsed(parser, "gpu_prefill", arguments)
    if args.smoke:
        args.contexts, args.repeats = [256], 1
    results = Results(
        args.out, "benchmarks/gpu_prefill.py", device, args.resume, smoke=args.smoke, repeats=args.repeats
    )
    with torch.no_grad():
        model = build("smoke" if args.smoke else "llama-3-8b", device)
        for context in args.contexts:
            for method in args.methods:
                if not results.has(method=method, context=context):
                    results.add(measure(model, method, context, args.repeats))
    print(table(results.rows))


if __name__ == "__main__":
    main()
