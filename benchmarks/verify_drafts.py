"""The option verify on SmolLM2 in float32: equal tokens, accepted drafts, and bytes over PCIe.

    python benchmarks/verify_drafts.py --text build/unseen.txt    (8 windows of 4,096 tokens; --samples 2 is shorter)

The model continues disjoint windows of the text greedily. Intervals are 95 % over the windows. On a CPU, the bytes are
counted. The same command resumes from `--out`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

import specache_compile as sc
from specache_compile.bench.results import Results
from specache_compile.evaluation.intervals import interval
from specache_compile.evaluation.provenance import model_hash
from specache_compile.evaluation.reader import Reader
from specache_compile.evaluation.run_eval import load
from specache_compile.evaluation.settings import UNCOMPILED, parse_setting, running
from specache_compile.evaluation.tasks.task import Bench

SETTINGS = (
    "specache:verify=16",
    "specache:bits=1,verify=16",
    "specache:setting=paper,verify=16",
    "specache:setting=paper,bits=1,verify=16",
)


def generate(model: Any, ids: Tensor, tokens: int) -> tuple[list[int], float]:
    """`tokens` greedy tokens behind `ids` [1, n], and the seconds that they took, prefill included."""
    start = time.perf_counter()
    arguments = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    return out[0, ids.shape[1] :].tolist(), time.perf_counter() - start


def equal_tokens(got: list[int], expected: list[int]) -> int:
    """How many tokens are equal, up to the first that is not."""
    return next((place for place, pair in enumerate(zip(got, expected, strict=True)) if pair[0] != pair[1]), len(got))


def measured(model: Any, ids: Tensor, expected: list[int] | None, tokens: int) -> dict[str, Any]:
    """One prompt under what the model is compiled with; `expected` None: it is what others are compared with."""
    said, seconds = generate(model, ids, tokens)
    row: dict[str, Any] = {"text": said, "tokens": len(said), "seconds": seconds}
    if expected is not None:
        told = sc.stats(model).verification
        assert told is not None, "nothing was drafted"
        row |= {"equal": equal_tokens(said, expected), **vars(told)}
    return row


def measure(model: Any, prompts: dict[int, list[list[int]]], args: argparse.Namespace, results: Results) -> None:
    """Add the rows that the results lack. The uncompiled model's tokens are those expected of the settings."""
    settings = (UNCOMPILED, *args.settings)
    total = len(settings) * sum(map(len, prompts.values()))
    with tqdm(total=total, file=sys.stderr, unit="prompt") as bar:
        for setting in settings:
            with running(model, parse_setting(setting), args.lowering):
                for context, windows in prompts.items():
                    for window, ids in enumerate(windows):
                        place = {"context": context, "window": window}
                        if not results.has(setting=setting, **place):
                            full = results.find(setting=UNCOMPILED, **place)
                            row = measured(model, torch.tensor([ids]), full[0]["text"] if full else None, args.tokens)
                            results.add({"setting": setting, **place, **row})
                        bar.update()


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each setting and context."""
    lines = []
    for context, setting in dict.fromkeys((row["context"], row["setting"]) for row in rows):
        same = [row for row in rows if (row["context"], row["setting"]) == (context, setting)]
        count = sum(row["tokens"] for row in same)
        if setting == UNCOMPILED:  # what the others are compared with
            continue
        said = [row["tokens_per_verification"] for row in same]
        spread = interval(said)
        means = {
            name: statistics.fmean(row[name] for row in same)
            for name in ("acceptance", "bytes_per_token", "offload_bytes_per_token")
        }
        lines.append(
            (
                f"{context:,}", setting,
                f"{sum(row['equal'] for row in same):,} of {count:,}",
                f"{means['acceptance']:.3f}",
                f"{statistics.fmean(said):.1f}" + ("" if math.isnan(spread) else f" ± {spread:.1f}"),
                f"{means['bytes_per_token'] / 2**20:,.1f}",
                f"{means['bytes_per_token'] / means['offload_bytes_per_token']:.3f}",
            )
        )  # fmt: skip
    headers = ("context", "", "equal tokens", "acceptance", "tokens a verification", "MiB a token", "of offload's")
    return tabulate(lines, headers, colalign=("right", "left", *["right"] * 5), disable_numparse=True)


def prompts_of(args: argparse.Namespace, reader: Reader) -> dict[int, list[list[int]]]:
    """Windows of the text, of every length."""
    bench = Bench(reader, tuple(args.contexts), args.samples, args.seed, 1 << 62, tuple(args.text))
    return {context: bench.windows_apart(context) for context in args.contexts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a checkpoint's name or path (smollm2-135m)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096], help="tokens of prompt (4096)")
    parser.add_argument("--samples", type=int, default=8, help="windows (8)")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens behind each (256)")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), metavar="NAME:option=value,...")
    parser.add_argument("--text", nargs="+", type=Path, default=[], help="texts (default: library source)")
    parser.add_argument("--seed", type=int, default=0, help="of the windows (0)")
    parser.add_argument("--lowering", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--out", type=Path, default=Path("build/verify.json"), help="(%(default)s)")
    args = parser.parse_args()
    model, reader = load(args.model, "cpu", torch.float32)
    prompts = prompts_of(args, reader)
    text = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:12]
    settings = {"model": model_hash(model), "prompts": text, "tokens": args.tokens, "lowering": args.lowering}
    results = Results(args.out, "benchmarks/verify_drafts.py", torch.device("cpu"), resume=True, **settings)
    measure(model, prompts, args, results)
    print(table(results.rows))


if __name__ == "__main__":
    main()
