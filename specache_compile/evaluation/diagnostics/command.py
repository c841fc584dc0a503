"""`specache diagnose`: what the papers' figures show of attention, policies and guesses, on a model and a text."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tabulate import tabulate
from tqdm import tqdm

from specache_compile.checkpoints.loaded import limit_of
from specache_compile.checkpoints.names import MODEL, origin
from specache_compile.errors import SpecacheError
from specache_compile.evaluation.baselines.eviction import check_block, tokens_or_prompt
from specache_compile.evaluation.command import DTYPES, check_inputs, load, text_identity
from specache_compile.evaluation.provenance import model_hash, provenance
from specache_compile.evaluation.tasks.task import Bench
from specache_compile.options import LOWERINGS

from . import DIAGNOSTICS
from .files import draw, read, write
from .inspected import EVICTION_BLOCK, Inspected
from .point import Point

# Points of a curve that the table shows.
SHOWN = 8
# Beside the model and the text a diagnostic's points depend on these.
MEASURED = ("length", "steps", "windows", "seed", "eviction_block", "device", "dtype", "lowering")


def add_diagnose(command: argparse.ArgumentParser) -> None:
    """The arguments of `specache diagnose`."""
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.epilog = "\n".join(("diagnostics:", *(f"  {name:12} {d.what}" for name, d in DIAGNOSTICS.items())))
    command.add_argument("model", help=MODEL)
    command.add_argument("--which", nargs="+", default=list(DIAGNOSTICS), metavar="NAME", help="some of them (all)")
    command.add_argument("--length", type=int, default=1024, help="tokens of a window of text (default: 1024)")
    command.add_argument("--steps", type=int, default=128, help="of which the last are fed one by one (default: 128)")
    command.add_argument("--windows", type=int, default=4, help="of text (default: 4)")
    command.add_argument("--seed", type=int, default=0, help="of the windows (default: 0)")
    command.add_argument(
        "--eviction-block", type=tokens_or_prompt, default=EVICTION_BLOCK, metavar="TOKENS",
        help="tokens before the steps that policies encode between evictions; prompt: all are read exactly, and "
        "evicted from once (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--text", nargs="+", type=Path, default=[], metavar="FILE",
        help="the text (default: library source held out of training)",
    )  # fmt: skip
    command.add_argument("--out", type=Path, default=Path("build/diagnose"), help="folder of the results (%(default)s)")
    cuda = torch.cuda.is_available()
    command.add_argument("--device", default="cuda" if cuda else "cpu", help="default: %(default)s")
    command.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and cache (default: float32)")
    command.add_argument("--lowering", choices=LOWERINGS, default="eager", help="default: eager")
    command.add_argument("--no-plots", action="store_true", help="data only")


def run_diagnose(args: argparse.Namespace, command: Sequence[str]) -> None:
    """Check everything, load the model, measure what is not on disk yet; print a table of each."""
    check_arguments(args)
    model, reader = load(args.model, args.device, DTYPES[args.dtype])
    if args.length > limit_of(model):
        raise SpecacheError(f"--length {args.length:,}: the model's context is {limit_of(model):,}")
    bench = Bench(reader, (args.length,), args.windows, args.seed, limit_of(model), tuple(args.text))
    fingerprint = model_hash(model)
    key = json.dumps(
        {name: getattr(args, name) for name in MEASURED} | {"model": fingerprint, "texts": text_identity(args.text)},
        sort_keys=True,
    )
    line = provenance(
        shlex.join(["specache", *command]), fingerprint, args.device, str(model.dtype), args.seed, origin(args.model)
    )
    args.out.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(args.which))
    with tqdm(total=sum(DIAGNOSTICS[name].runs for name in names), file=sys.stderr, unit="run") as bar:
        ids = torch.tensor(bench.windows_apart(args.length), device=model.device)
        run = Inspected(model, ids, args.steps, args.lowering, args.eviction_block, bar.update)
        found = list(measure(names, run, key, line, args, bar))
    for name, points in found:
        print(f"\n{name}: {DIAGNOSTICS[name].what}\n{table(points, DIAGNOSTICS[name].x)}")
    print(f"written: {', '.join(str(args.out / name) for name in names)} (.json, .csv)", file=sys.stderr)


def measure(
    names: Sequence[str], run: Inspected, key: str, line: str, args: argparse.Namespace, bar: tqdm
) -> Iterator[tuple[str, list[Point]]]:
    """Each diagnostic's points: from the disk, or measured and written at once."""
    for name in names:
        bar.set_description(name)
        diagnostic, path = DIAGNOSTICS[name], args.out / f"{name}.json"
        done = read(path, key)
        points, source = done or (diagnostic.points(run), line)
        if done is None:
            path.with_suffix(".png").unlink(missing_ok=True)
            write(path, diagnostic.what, key, points, source)
        if not args.no_plots and not path.with_suffix(".png").exists():
            picture(path, name, points, source)
        yield name, points


def picture(path: Path, name: str, points: Sequence[Point], line: str) -> None:
    try:
        draw(path.with_suffix(".png"), DIAGNOSTICS[name], points, line)
    except ImportError:
        print("no pictures: pip install matplotlib", file=sys.stderr)


def check_arguments(args: argparse.Namespace) -> None:
    """Errors that need no model."""
    for name in args.which:
        if name not in DIAGNOSTICS:
            raise SpecacheError(f"unknown diagnostic {name!r}: known are {', '.join(DIAGNOSTICS)}")
    for name in ("length", "steps", "windows"):
        if getattr(args, name) < 1:
            raise SpecacheError(f"--{name} {getattr(args, name)}: give a whole number, 1 or more")
    if not 2 < args.steps < args.length - 1:
        raise SpecacheError(f"--steps {args.steps}: give more than 2, and fewer than --length ({args.length}) less one")
    check_block("eviction_block", args.eviction_block)
    check_inputs(args)


def table(points: Sequence[Point], x: str) -> str:
    """A line for each curve, a column for each x, or for SHOWN of them."""
    curves = list(dict.fromkeys(point.curve for point in points))
    every = sorted({point.x for point in points})
    step = max(1, -(-len(every) // SHOWN)) if len(every) > 2 * SHOWN else 1
    columns = every[::step]
    at = {(point.curve, point.x): point.y for point in points}
    rows = [[curve, *(at.get((curve, x)) for x in columns)] for curve in curves]
    return tabulate(rows, headers=[x, *(f"{value:g}" for value in columns)], floatfmt=".3f")
