"""Run `specache eval`: tasks × methods, one finished row at a time."""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from specache_compile.bench.results import provenance
from specache_compile.checkpoints.loaded import limit_of, load_model
from specache_compile.checkpoints.names import origin
from specache_compile.errors import SpecacheError
from specache_compile.methods import parse_options
from specache_compile.runtime.stats import stats

from .baselines import kvzip
from .cell_tables import table
from .plots import draw
from .reader import Reader
from .result_rows import ResultRow, config_hash, model_hash, read_rows, sources, write_rows
from .runner import Prefills, Runner
from .settings import Setting, evicting_once, parse_setting, running
from .tasks import NO_QUESTION, TASKS
from .tasks.task import Bench, Cell


def run_eval(args: argparse.Namespace, command: Sequence[str]) -> None:
    """Check the arguments, load the model, measure the missing rows, print and write the results."""
    settings = list(dict.fromkeys(parse_setting(text) for text in args.methods))
    if args.blind:
        settings = list(dict.fromkeys(evicting_once(setting) for setting in settings))
    check_arguments(args)
    args.lowering = args.lowering or ("eager" if args.device == "cpu" else "inductor")
    model, reader = load(args.model, args.device, args.dtype)
    bench = Bench(reader, args.samples, args.seed, tuple(args.text), args.chat, args.blind, args.keys)
    tasks, lengths, limit = dict.fromkeys(args.tasks), dict.fromkeys(args.lengths), limit_of(model)
    cells = [(task, TASKS[task](bench, length)) for task in tasks for length in lengths]
    for task, cell in cells:
        if cell.context > limit:
            tokens = f"{task} {cell.name}: {cell.context:,} tokens"
            raise SpecacheError(f"{tokens} exceed the model's context of {limit:,}. Lower --lengths")
    fingerprint = model_hash(model)
    made_by = provenance(torch.device(args.device), "specache", command)
    made_by |= {"weights": fingerprint, "model": origin(args.model), "dtype": model.dtype, "seed": args.seed}
    line = "; ".join(f"{name} {value}" for name, value in made_by.items() if value not in (None, ""))
    path = args.out / "results.json"
    whole = f"{fingerprint} {config_hash(model, reader.tokenizer)}"
    prefills = Prefills(model.device, chunk=args.prefill_chunk) if args.share_prefills else None
    runner, done = Runner(model, reader, args.batch_size, prefills), read_rows(path)
    for setting in (one for one in settings if one.name == "kvzip"):
        options: Any = parse_options(setting.measured)
        with running(model, setting, args.lowering):
            if not runner.shares and any(options.budget_in_tokens(c.context) < c.context for _, c in cells):
                kvzip.refuse()  # before the rows of other methods
    # Cell by cell, so that only one cell's prefills are in memory.
    order = [(key_of(s, task, cell, bench, whole, args), s, task, cell) for task, cell in cells for s in settings]
    keys = [key for key, *_ in sorted(order, key=lambda each: settings.index(each[1]))]
    missing = [each for each in order if each[0] not in done]
    write_rows(path, done, keys)  # an error of --out comes before the first row
    try:
        with tqdm(missing, file=sys.stderr, desc="specache eval", unit="row") as bar:
            for key, setting, task, cell in bar:
                if prefills is not None:
                    prefills.begin(f"{task} {cell.name}")
                bar.set_postfix_str(f"{setting}, {task} {cell.name}")
                done[key] = measure(runner, setting, task, cell, key, args, line)
                write_rows(path, done, keys)
    except KeyboardInterrupt:
        print("interrupted: finished rows are kept; the same command goes on from here", file=sys.stderr)
        raise
    finally:
        report([done[key] for key in keys if key in done], args)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise SpecacheError for arguments that do not go together; no model is needed."""
    for task in args.tasks:
        if args.blind and task in NO_QUESTION:
            raise SpecacheError(f"task {task!r} has no question for --blind to hide: remove the task or --blind")
    if args.prefill_chunk is not None and not args.share_prefills:
        raise SpecacheError("--prefill-chunk needs --share-prefills: a method takes a first chunk for the prompt")
    for path in args.text:
        if not path.is_file():
            raise SpecacheError(f"--text {path}: no such file. Pass an existing one")
    read_rows(args.out / "results.json")


def load(name: str, device: str, dtype: str) -> tuple[Any, Reader]:
    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*torch.jit.script_method.*")
    model, tokenizer = load_model(name, dtype, device)
    return model, Reader(tokenizer)


def key_of(setting: Setting, task: str, cell: Cell, bench: Bench, model: str, args: argparse.Namespace) -> str:
    """The key of a row: all inputs of its figures except the code, including the effective options.

    model: the model's hashes.
    """
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in bench.texts]
    texts = hashes or f"library of python {platform.python_version()}"
    return json.dumps(
        {
            "task": task, "cell": cell.name, "context": cell.context, "method": str(setting), "samples": bench.samples,
            "seed": bench.seed, "model": model, "dtype": args.dtype, "device": args.device,
            "lowering": args.lowering, "texts": texts, "batch_size": args.batch_size,
            "options": setting.effective, **cell.facts,
            **({"blind": True} if bench.blind else {}),
            **({"prefills": "shared"} if args.share_prefills else {}),
            **({"prefill_chunk": args.prefill_chunk} if args.prefill_chunk else {}),
        },
        sort_keys=True,
    )  # fmt: skip


def measure(
    runner: Runner, setting: Setting, task: str, cell: Cell, key: str, args: argparse.Namespace, line: str
) -> ResultRow:
    """The row of a cell under a setting, with a newly compiled model."""
    torch.manual_seed(args.seed)
    start = time.perf_counter()
    with running(runner.model, setting, args.lowering):
        outcome = cell.measure(runner)
        ratio = 1.0 if setting.options is None else kv_ratio(runner.model)
    return ResultRow(
        key=key, task=task, method=str(setting), cell=cell.name, context=cell.context, **vars(outcome),
        seed=args.seed, kv_ratio=ratio, seconds=round(time.perf_counter() - start, 2), provenance=line,
    )  # fmt: skip


def kv_ratio(model: Any) -> float | None:
    """Device KV bytes over those of the full cache, in the model's dtype, in the last batch; None if nothing was
    rewritten, which is logged."""
    try:
        return stats(model).kv_ratio * 2 / model.dtype.itemsize  # `stats` compares with a 16-bit cache
    except SpecacheError:
        return None


def report(rows: Sequence[ResultRow], args: argparse.Namespace) -> None:
    """Print the table; write table.txt and the plots."""
    if not rows:
        return
    print(table(rows))
    (args.out / "table.txt").write_text("\n".join((table(rows), "", *sources(rows), "")), "utf-8")
    made = [args.out / name for name in ("results.json", "table.txt")]
    if not args.no_plots:
        try:
            made += draw(rows, args.out)
        except ImportError:
            print("no pictures: pip install matplotlib", file=sys.stderr)
    print("", *sources(rows), sep="\n", file=sys.stderr)
    print(f"written: {', '.join(map(str, made))}", file=sys.stderr)
