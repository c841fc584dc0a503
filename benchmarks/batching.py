"""Throughput of `sc.Batch` for several batch sizes.

    python benchmarks/batching.py    (eight minutes on two cores; --requests 4 --rows 1 4 is shorter)

Each batch size gets the same prompts, with log-normal lengths around `--tokens`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm

import specache_compile as sc
from specache_compile.batching.request import Request
from specache_compile.bench.results import provenance
from specache_compile.evaluation.run_eval import load

# Of lengths' logarithms, as the traffic of chats has it.
SPREAD = 0.6


def prompts(model: Any, args: argparse.Namespace) -> list[torch.Tensor]:
    """Random prompts, whose lengths are log-normal around `--tokens`."""
    spread = SPREAD * torch.randn(args.requests, generator=torch.Generator().manual_seed(0))
    counts = (args.tokens * torch.exp(spread)).int().clamp_min(8).tolist()
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, model.config.vocab_size, (count,), generator=generator) for count in counts]


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
    seconds, tokens = time.perf_counter() - began, sum(len(request.generated) for request in requests)
    told = {
        "rows": rows,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / (time.process_time() - cpu),
        "between_tokens_p50": statistics.median(between),
        "between_tokens_p95": statistics.quantiles(between, n=20)[-1],
    }
    return told, requests


def table(rows: list[dict[str, Any]]) -> str:
    """The table by number of rows: tokens per second, and the time between two tokens of a row."""
    first = rows[0]["tokens_per_second"]
    lines = [
        [
            int(row["rows"]), f"{row['tokens_per_second']:.1f}", f"{row['tokens_per_second'] / first:.2f}",
            *(f"{1e3 * row[f'between_tokens_{of}']:.0f}" for of in ("p50", "p95")), int(row["as_alone"]),
        ]
        for row in rows
    ]  # fmt: skip
    heads = ["rows", "tokens/s", "of the first", "between tokens, ms, p50", "p95", "answers as the first's"]
    return tabulate(lines, headers=heads, disable_numparse=True, colalign=["right"] * len(heads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=400, help="prompts' median length (%(default)s)")
    parser.add_argument("--answer", type=int, default=32, help="tokens said to each (%(default)s)")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--lowering", default="inductor")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model, _ = load(args.model, "cpu", torch.float32)
    model.compile(backend="specache", options={"lowering": args.lowering})
    given = prompts(model, args)
    alone = None
    found: dict[int, list[Any]] = {rows: [] for rows in args.rows}
    turns = [(repeat, rows) for repeat in range(args.repeats + 1) for rows in args.rows]
    for repeat, rows in tqdm(turns, file=sys.stderr, unit="turn"):  # the first repeat compiles
        told, requests = answered(model, given, rows, args)
        said = [request.generated for request in requests]
        alone = alone or said
        told["as_alone"] = sum(ours == theirs for ours, theirs in zip(said, alone, strict=True))
        if repeat:
            found[rows].append(told)
    rows = [{name: statistics.median(run[name] for run in runs) for name in runs[0]} for runs in found.values()]
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    made_by = provenance(torch.device("cpu"), "benchmarks/batching.py")
    report = {"provenance": made_by, "settings": settings, "rows": rows}
    print(table(rows))
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
