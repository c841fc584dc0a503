"""What benchmarks share that measure distances behind prompts of a text: their arguments, and what these ask for."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from specache_compile.bench.results import Results
from specache_compile.evaluation.command import load
from specache_compile.evaluation.prefills import Prefills
from specache_compile.evaluation.runner import Runner
from specache_compile.evaluation.tasks.closeness import STEPS, Continuations
from specache_compile.evaluation.tasks.task import Bench


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """name: of the results' file."""
    parser.add_argument("--model", default="smollm2-135m", help="a checkpoint (smollm2-135m)")
    parser.add_argument("--text", type=Path, default=Path("build/unseen.txt"), help="(build/unseen.txt)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a prompt and its continuation (2048)")
    parser.add_argument("--windows", type=int, default=16, help="prompts (16)")
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out has, and go on")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / name)


def prepared(args: argparse.Namespace, script: str) -> tuple[Runner, Continuations, Results]:
    """The model with shared prefills, the prompts and their continuations, and where results go."""
    model, reader = load(args.model, "cpu", torch.float32)
    settings = {
        "model": args.model, "text": str(args.text), "length": args.length, "windows": args.windows, "steps": STEPS,
    }  # fmt: skip
    results = Results(args.out, script, torch.device("cpu"), args.resume, **settings)
    prefills = Prefills(model.device)
    prefills.begin(f"{args.length}")
    bench = Bench(reader, (args.length,), args.windows, 0, args.length, (args.text,), None, False, False)
    known = Continuations(bench.windows_apart(args.length), 0)
    return Runner(model, reader, prefills=prefills), known, results
