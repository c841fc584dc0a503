"""Many requests at once: tokens a second of `sc.Batch` by the rows that say tokens together, and the rows that fit.

Each number of rows answers the same requests, prompts of lengths drawn log-normally around `--tokens`, all there from
the beginning; rows of one are one request at a time. Beside it the rows of one length whose device tiers fit where
a cache of 16 bits has one row (computed), and the host bytes for each byte on the device. On a CPU both lie in one
memory, and a batch in 16 bits that fits is faster: what is won there is memory.

    python benchmarks/batching.py                                               smollm2-135m, half an hour on two cores
    python benchmarks/batching.py --model examples/needle-llama --tokens 80 --requests 4 --rows 1 4 --lowering eager
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import specache_compile as sc
from specache_compile.batching.request import Request
from specache_compile.bench.results import provenance
from specache_compile.evaluation.command import load
from specache_compile.runtime.state import device_total, full_cache_bytes, predicted_bytes

# Of lengths' logarithms, as the traffic of chats has it.
SPREAD = 0.6


def prompts(model: Any, args: argparse.Namespace) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = (args.tokens * torch.exp(SPREAD * torch.randn(args.requests, generator=generator))).int().clamp_min(8)
    return [torch.randint(0, model.config.vocab_size, (int(n),), generator=generator) for n in lengths]


def answered(model: Any, given: list[torch.Tensor], rows: int, args: argparse.Namespace) -> tuple[Any, list[Request]]:
    """What a run took: seconds, CPU seconds, and between a row's tokens the median and the 95th percentile."""
    batch = sc.Batch(model, rows=rows, chunk=args.chunk)
    requests = [batch.add(ids, max_new_tokens=args.answer, eos_token_id=None) for ids in given]
    began, cpu, last, between = time.perf_counter(), time.process_time(), dict[Request, float](), list[float]()
    while batch.open:
        for request, _ in batch.step():
            now = time.perf_counter()
            between += [now - last[request]] if request in last else []
            last[request] = now
    seconds, tokens = time.perf_counter() - began, sum(len(request.said) for request in requests)
    told = {
        "rows": rows,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / (time.process_time() - cpu),
        "between_tokens_p50": statistics.median(between),
        "between_tokens_p95": statistics.quantiles(between, n=20)[-1],
    }
    return told, requests


def fitting(batch: sc.Batch, context: int) -> dict[str, Any]:
    """Rows of `context` tokens in the device bytes of one row in 16 bits, of a large batch; and the host's share."""
    tiers = predicted_bytes(batch.options, batch.memory.layers, 1, context)
    device = device_total(tiers)
    full = full_cache_bytes(batch.memory.layers, 1, context)
    return {"context": context, "rows_in_one": full / device, "host_bytes_per_device_byte": tiers["host"] / device}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=400, help="prompts' median length (%(default)s)")
    parser.add_argument("--answer", type=int, default=32, help="tokens said to each (%(default)s)")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--context", type=int, default=8192, help="of the rows that fit (%(default)s)")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--lowering", default="inductor")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model, _ = load(args.model, "cpu", torch.float32)
    model.compile(backend="specache", options={"lowering": args.lowering})
    given = prompts(model, args)
    alone = None
    found: dict[int, list[Any]] = {rows: [] for rows in args.rows}
    for repeat in range(args.repeats + 1):  # the first compiles
        for rows in args.rows:
            told, requests = answered(model, given, rows, args)
            said = [request.said for request in requests]
            alone = alone or said
            told["as_alone"] = sum(ours == theirs for ours, theirs in zip(said, alone, strict=True))
            if repeat:
                found[rows].append(told)
    rows = [{name: statistics.median(run[name] for run in runs) for name in runs[0]} for runs in found.values()]
    batch = sc.Batch(model)
    batch.add(given[0], max_new_tokens=1)
    batch.run()
    fits = fitting(batch, args.context)
    print(tabulate([row.values() for row in rows], headers=list(rows[0]), floatfmt=".4g"))
    print(f"as_alone: of {len(given)} answers those equal to what the first number of rows says")
    print("; ".join(f"{name} {value:.4g}" for name, value in fits.items()))
    if args.out is not None:
        settings = {name: value for name, value in vars(args).items() if name != "out"}
        made_by = provenance(torch.device("cpu"), "benchmarks/batching.py")
        result = {"provenance": made_by, "settings": settings, "rows": rows, "fits": fits}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
