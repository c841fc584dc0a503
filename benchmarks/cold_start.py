"""Seconds to the first 8 tokens of a new process: specache and plain `torch.compile`, with empty and filled caches.

    python benchmarks/cold_start.py    (--layers 4 is shorter)

The model has SmolLM2-135M's shape and random weights in float32. Cold: Inductor's cache folder is empty. Warm: the cold
run has filled it. *traces kept*: the folder of SPECACHE_CACHE is filled too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import specache_compile  # noqa: F401  (its import is no part of a compilation)
from specache_compile.bench.results import provenance

SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
# With the folder of traces as a third case.
KEPT = "specache, traces kept"
CASES = ("torch.compile", "specache", KEPT)
PROMPT, NEW = 100, 8


def run_case(name: str, layers: int, lowering: str) -> dict[str, float]:
    """Compile one model by generating with it, in this process: seconds, and those of a second run."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMOLLM2, num_hidden_layers=layers)).eval()
    ids = torch.randint(0, model.config.vocab_size, (1, PROMPT))
    if name == "torch.compile":
        model.compile(backend=lowering)
    else:
        model.compile(backend="specache", options={"lowering": lowering})
    seconds = {}
    for what in ("seconds", "again"):
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=NEW, do_sample=False)
        seconds[what] = time.perf_counter() - start
    return seconds


def in_new_process(name: str, cache: str, args: argparse.Namespace) -> dict[str, float]:
    """`run_case` in a new process with this folder of caches; for KEPT also with a folder of traces."""
    command = [sys.executable, __file__, "--case", name, "--layers", str(args.layers), "--lowering", args.lowering]
    traces = f"{cache}/traces" if name == KEPT else ""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "SPECACHE_CACHE": traces}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return row


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each case and state of the caches: the middle run. Interleaved runs spread a busy minute evenly."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, tqdm(total=len(CASES) * (1 + args.warms), file=sys.stderr) as bar:
        for state, count in (("cold", 1), ("warm", args.warms)):
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
            for name in CASES * count:
                bar.set_postfix_str(f"{name}, {state}")
                runs[name].append(in_new_process(name, f"{folder}/{CASES.index(name)}", args))
                bar.update()
            for name, made in runs.items():
                middle = sorted(made, key=lambda run: run["seconds"])[len(made) // 2]
                rows.append({"way": name, "caches": state, **middle, "runs": [run["seconds"] for run in made]})
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30, help="of the model (30)")
    parser.add_argument("--warms", type=int, default=3, help="warm runs of each, the middle one counts (3)")
    parser.add_argument("--lowering", choices=("inductor", "eager"), default="inductor", help="eager compiles no C++")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cold_start.json")
    args = parser.parse_args(arguments)
    if args.case:
        print(json.dumps(run_case(args.case, args.layers, args.lowering)))
        return
    rows = measure(args)
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    origin = provenance(torch.device("cpu"), "benchmarks/cold_start.py")
    args.out.write_text(json.dumps({"provenance": origin, "layers": args.layers, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
