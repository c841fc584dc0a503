"""Seconds to the first 8 tokens of a new process: specache and plain `torch.compile`, with empty and filled caches.

    python benchmarks/cold_start.py    (--smoke: 4 thin layers, without compilation to C++)

The model has SmolLM2-135M's shape and random weights in float32. Cold: Inductor's cache folder is empty. Warm: the cold
run has filled it. *traces kept*: the folder of SPECACHE_CACHE is filled too.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import specache_compile  # noqa: F401  (its time to be imported is nobody's wait for a graph)
from specache_compile.bench.results import provenance

SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
THIN = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32,
}  # fmt: skip
BACKENDS: dict[str, dict[str, Any]] = {"torch.compile": {}, "specache": {"backend": "specache"}}
# The same ways into nothing, for a smoke run: Dynamo and the passes, but no C++.
SMOKE: dict[str, dict[str, Any]] = {
    "torch.compile": {"backend": "eager"},
    "specache": {"backend": "specache", "options": {"lowering": "eager"}},
}
# As "specache", with what the cold run has kept of its traces.
KEPT = "specache, traces kept"
PROMPT, NEW = 100, 8


def run_case(name: str, layers: int, smoke: bool) -> dict[str, float]:
    """Compile one model by generating with it, in this process: seconds, and those of a second run."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**SMOLLM2, **(THIN if smoke else {}), "num_hidden_layers": layers})
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, config.vocab_size, (1, PROMPT))
    model.compile(**(SMOKE if smoke else BACKENDS)[name])
    names = ("seconds", "again")
    return {name: time_of(lambda: model.generate(ids, max_new_tokens=NEW, do_sample=False)) for name in names}


def time_of(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def in_new_process(name: str, cache: str, args: argparse.Namespace) -> dict[str, float]:
    """`run_case` in a new process with this folder of caches; for KEPT also with a folder of traces."""
    backend = "specache" if name == KEPT else name
    command = [sys.executable, __file__, "--case", backend, "--layers", str(args.layers), *(["--smoke"] * args.smoke)]
    traces = f"{cache}/traces" if name == KEPT else ""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "SPECACHE_CACHE": traces}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return row


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each backend and state of the caches. Interleaved runs spread a busy minute evenly."""
    rows: list[dict[str, Any]] = []
    with (
        contextlib.ExitStack() as stack,
        tqdm(total=(len(BACKENDS) + 1) * (args.colds + args.warms), file=sys.stderr) as bar,
    ):
        runs: dict[tuple[str, str], list[dict[str, float]]] = {
            (n, s): [] for s in ("cold", "warm") for n in (*BACKENDS, KEPT)
        }
        caches: dict[str, str] = {}
        for state, count in (("cold", args.colds), ("warm", args.warms)):
            for _, name in itertools.product(range(count), (*BACKENDS, KEPT)):
                bar.set_postfix_str(f"{name}, {state}")
                if state == "cold":
                    caches[name] = stack.enter_context(tempfile.TemporaryDirectory())
                runs[name, state].append(in_new_process(name, caches[name], args))
                bar.update()
    for (name, state), made in runs.items():
        middle = sorted(made, key=lambda run: run["seconds"])[len(made) // 2]
        rows.append({"way": name, "caches": state, **middle, "runs": [run["seconds"] for run in made]})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The middle run of each row, the spread, and the share of plain torch.compile's."""
    plain = {row["caches"]: row["seconds"] for row in rows if row["way"] == "torch.compile"}
    lines = [
        (
            row["caches"], row["way"], f"{row['seconds']:.1f}", f"{min(row['runs']):.1f} to {max(row['runs']):.1f}",
            f"{row['seconds'] / plain[row['caches']]:.2f}", f"{row['again']:.2f}",
        )
        for row in rows
    ]  # fmt: skip
    headers = ("caches", "", "seconds", "of all runs", "of plain", "second run")
    return tabulate(lines, headers, colalign=("left", "left", *["right"] * 4), disable_numparse=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="of the model (default: 30)")
    parser.add_argument("--colds", type=int, default=1, help="cold runs of each, the middle one counts (default: 1)")
    parser.add_argument("--warms", type=int, default=3, help="warm runs of each, the middle one counts (default: 3)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, no C++, one run of each")
    parser.add_argument("--case", choices=list(BACKENDS), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cold_start.json")
    args = parser.parse_args(arguments)
    args.layers = args.layers or (4 if args.smoke else 30)
    if args.smoke:
        args.warms = 1
    if args.case:
        print(json.dumps(run_case(args.case, args.layers, args.smoke)))
        return
    rows = measure(args)
    print(table(rows))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    origin = provenance(torch.device("cpu"), "benchmarks/cold_start.py")
    args.out.write_text(json.dumps({"provenance": origin, "layers": args.layers, "rows": rows}, indent=2) + "\n")
    print(f"\n{args.layers} layers, a prompt of {PROMPT} tokens and {NEW} new ones; data: {args.out}")


if __name__ == "__main__":
    main()
