"""Exact settings on SmolLM2: tokens equal to the uncompiled float32 model's, accepted drafts, and bytes over PCIe.

    python benchmarks/verify_drafts.py --text build/unseen.txt    (8 windows of 4,096 tokens; --samples 2 is shorter)
    python benchmarks/verify_drafts.py --device cuda --dtype bfloat16 --contexts 960 --samples 4 --tokens 64

The model continues disjoint windows of the text greedily. Intervals are 95 % over the windows. On a CPU, the bytes are
counted. In bfloat16, a token may differ where rounding decides a tie. The same command resumes from `--out`. Exit
status 1: a token differs.
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
from specache_compile.checkpoints.loaded import DTYPES
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


def logits_after(model: Any, ids: Tensor) -> Tensor:
    """Of the next token, [vocabulary] float32 on the CPU."""
    with torch.inference_mode():
        return model(ids.to(model.device), logits_to_keep=1).logits[0, -1].float().cpu()


def compared(exact: Any, model: Any, ids: Tensor, expected: list[int], got: list[int]) -> dict[str, Any]:
    """The number of equal tokens, and figures for the first different one.

    gap: the difference of the two tokens' logits in float32.
    rounding: the largest difference between a float32 logit and a logit of the uncompiled model in its dtype.
    """
    equal = equal_tokens(got, expected)
    if equal == len(expected):
        return {"equal": equal, "holds": True}
    until = torch.cat([ids, torch.tensor([expected[:equal]], dtype=ids.dtype)], 1)
    right, rounded = logits_after(exact, until), logits_after(model, until)
    gap, rounding = float(right[expected[equal]] - right[got[equal]]), float((rounded - right).abs().max())
    return {"equal": equal, "gap": gap, "rounding": rounding, "holds": gap <= 2 * rounding}


def measure(
    exact: Any, model: Any, prompts: dict[int, list[list[int]]], args: argparse.Namespace, results: Results
) -> None:
    """Add the rows that the results lack; `exact`: the uncompiled float32 model, whose tokens are expected."""
    settings = (UNCOMPILED, *args.settings)
    total = len(settings) * sum(map(len, prompts.values()))
    with tqdm(total=total, file=sys.stderr, unit="prompt") as bar:
        for setting in settings:
            with running(exact if setting == UNCOMPILED else model, parse_setting(setting), args.lowering) as now:
                for context, windows in prompts.items():
                    for window, ids in enumerate(windows):
                        place = {"setting": setting, "context": context, "window": window}
                        if not results.has(**place):
                            tokens, seconds = generate(now, torch.tensor([ids], device=now.device), args.tokens)
                            drafted = sc.stats(now).verification if setting != UNCOMPILED else None
                            row = {"text": tokens, "tokens": len(tokens), "seconds": seconds}
                            results.add({**place, **row, **(vars(drafted) if drafted else {})})
                        bar.update()
            for row in results.find(setting=setting):  # the model is uncompiled again
                if setting != UNCOMPILED and "equal" not in row:
                    (full,) = results.find(setting=UNCOMPILED, context=row["context"], window=row["window"])
                    ids = torch.tensor([prompts[row["context"]][row["window"]]])
                    row |= compared(exact, model, ids, full["text"], row["text"])
            results.write()


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each setting and context."""
    lines = []
    for context, setting in dict.fromkeys((row["context"], row["setting"]) for row in rows):
        same = [row for row in rows if (row["context"], row["setting"]) == (context, setting)]
        count = sum(row["tokens"] for row in same)
        if setting == UNCOMPILED:  # what the others are compared with
            continue
        figures = ["acceptance", "tokens_per_verification", "bytes_per_token", "offload_bytes_per_token"]
        drafted = [[row[name] for name in figures] for row in same if "acceptance" in row]
        accepted, tokens, moved, offloaded = map(list, zip(*drafted, strict=True)) if drafted else [[math.nan]] * 4
        spread, share = interval(tokens), statistics.fmean(moved) / statistics.fmean(offloaded)
        lines.append(
            (
                f"{context:,}", setting,
                f"{sum(row['equal'] for row in same):,} of {count:,}",
                f"{statistics.fmean(accepted):.3f}",
                f"{statistics.fmean(tokens):.1f}" + ("" if math.isnan(spread) else f" ± {spread:.1f}"),
                f"{statistics.fmean(moved) / 2**20:,.1f}",
                f"{share:.3f}",
            )
        )  # fmt: skip
    headers = ("context", "", "equal tokens", "acceptance", "tokens a verification", "MiB a token", "of offload's")
    return tabulate(lines, headers, colalign=("right", "left", *["right"] * 5), disable_numparse=True)


def prompts_of(args: argparse.Namespace, reader: Reader) -> dict[int, list[list[int]]]:
    """Windows of the text, of every length."""
    bench = Bench(reader, tuple(args.contexts), args.samples, args.seed, 1 << 62, tuple(args.text))
    return {context: bench.windows_apart(context) for context in args.contexts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a checkpoint's name or path (smollm2-135m)")
    parser.add_argument("--device", default="cpu", help="(cpu)")
    parser.add_argument("--dtype", choices=DTYPES[1:], default="float32", help="of the settings' model (float32)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096], help="tokens of prompt (4096)")
    parser.add_argument("--samples", type=int, default=8, help="windows (8)")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens behind each (256)")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), metavar="NAME:option=value,...")
    parser.add_argument("--text", nargs="+", type=Path, default=[], help="texts (default: library source)")
    parser.add_argument("--seed", type=int, default=0, help="of the windows (0)")
    parser.add_argument("--lowering", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--out", type=Path, default=Path("build/verify.json"), help="(%(default)s)")
    args = parser.parse_args()
    exact, reader = load(args.model, "cpu", torch.float32)
    same = (args.device, args.dtype) == ("cpu", "float32")
    model = exact if same else load(args.model, args.device, getattr(torch, args.dtype))[0]
    prompts = prompts_of(args, reader)
    text = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:12]
    settings = {"model": model_hash(exact), "prompts": text, "tokens": args.tokens, "lowering": args.lowering}
    settings |= {} if same else {"dtype": args.dtype}
    results = Results(args.out, "benchmarks/verify_drafts.py", torch.device(args.device), resume=True, **settings)
    measure(exact, model, prompts, args, results)
    print(table(results.rows))
    wrong = [row for row in results.rows if not row.get("holds", True)]
    for row in wrong:
        told = ", ".join(f"{name} {row[name]}" for name in ("setting", "context", "window", "equal", "gap", "rounding"))
        print(f"WRONG: {told}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
