"""Seconds from a saved session to the first token in a new process, and whether the cache is bit for bit equal.

    python benchmarks/restarts.py    (16,384 tokens; --tokens 1024 --restarts 100 looks for drift)

One process prefills a context and saves it. Further processes load it, generate one token and save again. A cold
process prefills the context instead. Seconds start after the model is loaded and include compilation.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm

import specache_compile as sc
from specache_compile.bench.results import provenance
from specache_compile.checkpoints.names import resolved
from specache_compile.compat import cache_of, with_cache
from specache_compile.evaluation.run_eval import load
from specache_compile.kernels.state.segments import tokens_of
from specache_compile.runtime.session import session_of
from specache_compile.runtime.state import MEASURE, fields_of


def digest(cache: Any) -> str:
    """16 hex digits over what every tier holds of the cached tokens."""
    session, hasher = session_of(cache), hashlib.sha256()
    assert session is not None
    session.drain()
    for layer, state in zip(session.layers, session.state, strict=True):
        for field in (field for field in fields_of(session.options, layer) if field.tier != MEASURE):
            tensor = state[field.name]
            # Of the host tier's last segment, what no token has written is whatever the memory held.
            held = tokens_of(tensor, 0, session.length) if field.has_all_pairs else tensor
            hasher.update(held.contiguous().view(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()[:16]


@torch.no_grad()
def child(args: argparse.Namespace) -> dict[str, Any]:
    """One process: prefill or load the context, generate a token, save. Returns hashes of the cache."""
    torch.manual_seed(0)
    model, _ = load(args.model, "cpu", torch.float32)
    model.compile(backend="specache", options={"lowering": args.lowering})
    generator = torch.Generator().manual_seed(args.number)
    ids = torch.randint(0, model.config.vocab_size, (1, 1 if args.number else args.tokens), generator=generator)
    start = time.perf_counter()
    cache = sc.load(args.folder, model) if args.number else None
    loading = time.perf_counter() - start
    came = digest(cache) if args.number else ""
    start = time.perf_counter()
    out = model(ids, **with_cache(cache), use_cache=True, logits_to_keep=1)
    int(out.logits[0, -1].argmax())
    seconds = loading + time.perf_counter() - start
    start = time.perf_counter()
    sc.save(cache_of(out), args.folder)
    saving = time.perf_counter() - start
    size = sum(path.stat().st_size for path in Path(args.folder).rglob("*") if path.is_file())
    return {"seconds": seconds, "saving": saving, "bytes": size, "came": came, "went": digest(cache_of(out))}


def in_new_process(number: int, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run process `number`; 0 is the cold one. The processes share a cache of compiled code."""
    command = [
        sys.executable, __file__, "--number", str(number), "--folder", f"{folder}/session", "--model", args.model,
        "--tokens", str(args.tokens), "--lowering", args.lowering,
    ]  # fmt: skip
    environment = {**os.environ, "SPECACHE_CACHE": f"{folder}/cache"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a checkpoint's name or path (%(default)s)")
    parser.add_argument("--tokens", type=int, default=16_384, help="of context (%(default)s)")
    parser.add_argument(
        "--restarts", type=int, default=4, help="processes that load it in turn, at least 2 (%(default)s)"
    )
    parser.add_argument("--lowering", choices=("inductor", "eager"), default="eager", help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "restarts.json")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.folder:
        print(json.dumps(child(args)))
        return 0
    args.model = str(resolved(args.model))  # a converted file is in the cache folder of this process
    with tempfile.TemporaryDirectory() as folder:
        processes = tqdm(range(1 + args.restarts), "processes", file=sys.stderr)
        cold, traced, *kept = [in_new_process(number, folder, args) for number in processes]
    equal = sum(after["came"] == before["went"] for before, after in itertools.pairwise([cold, traced, *kept]))
    first = statistics.median(row["seconds"] for row in kept)
    rows = {
        "tokens of context": args.tokens,
        "restarts": args.restarts,
        "of them bit for bit": equal,
        "cold: seconds to the first token": round(cold["seconds"], 2),
        "restarted, traces not kept: seconds to the first token": round(traced["seconds"], 2),
        "restarted, traces kept: seconds to the first token, median": round(first, 2),
        "share": round(first / cold["seconds"], 4),
        "seconds to save": round(cold["saving"], 2),
        "MiB on disk": round(cold["bytes"] / 2**20, 1),
    }
    print(tabulate(rows.items()))
    report = {"provenance": provenance(torch.device("cpu"), "benchmarks/restarts.py"), **rows}
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(equal < args.restarts)


if __name__ == "__main__":
    sys.exit(main())
