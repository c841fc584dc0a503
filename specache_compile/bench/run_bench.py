"""Run `specache bench`: measure all methods in turn; resume after an interruption."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from specache_compile.errors import SpecacheError

from .bench_model import check_room, config_of, open_model
from .measurements import BenchPlan, cell, steps_behind
from .results import Results
from .runners import can_extend, check_name, why_not
from .table import draw, steps_table


def run_bench(args: argparse.Namespace, command: Sequence[str]) -> None:
    """Check the arguments, load the model, measure the missing rows, print the tables."""
    check_arguments(args)
    config = config_of(args.model, args.layers)
    methods = usable(args.methods, config)
    dtype: Any = getattr(torch, args.dtype) if args.dtype != "auto" else config.dtype or torch.float32
    check_room(config, args.contexts, steps_behind(args.rounds), args.batch_sizes, len(methods), dtype, args.device)
    device = torch.device(args.device)
    settings = {name: getattr(args, name) for name in ("model", "layers", "dtype", "lowering", "rounds")}
    settings["threads"] = torch.get_num_threads()
    results = Results(args.json, "specache", device, resume=True, given=command, **settings)
    try:
        measure_missing(args, methods, results)
    except KeyboardInterrupt:
        kept = "--json FILE keeps finished contexts"
        if args.json is not None and results.rows:
            kept = f"the same command resumes from {args.json}"
        elif args.json is not None:
            kept = "no context is finished"
        print(f"interrupted: {kept}", file=sys.stderr)
        raise
    finally:
        report(results, args)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise SpecacheError for bad arguments; no model is needed."""
    for name in args.methods:
        check_name(name)
    for flag, values in (("contexts", args.contexts), ("batch-sizes", args.batch_sizes), ("rounds", [args.rounds])):
        for value in values:
            if value < 1:
                raise SpecacheError(f"--{flag} {value}: give a whole number, 1 or more")
    if not 0 <= args.extend <= min(args.contexts):
        raise SpecacheError(f"--extend {args.extend}: give a whole number from 0 to the shortest of --contexts")
    for path in (args.json, args.plot):
        if path is not None and not path.parent.is_dir():
            raise SpecacheError(f"{path}: folder {path.parent} does not exist; create it first")


def usable(methods: Sequence[str], config: Any) -> list[str]:
    """The available methods. Unavailable methods are printed with the reason."""
    kept = []
    for name in dict.fromkeys(methods):
        reason = why_not(name, config)
        if reason is None:
            kept.append(name)
        else:
            print(f"{name}: left out: {reason}", file=sys.stderr)
    if not kept:
        raise SpecacheError("--methods: none of them is available on this machine, for the reasons above")
    return kept


def measure_missing(args: argparse.Namespace, methods: list[str], results: Results) -> None:
    """Measure the cells that are incomplete in the file."""

    def had(context: int, batch: int) -> dict[str, dict[str, Any]]:
        return {row["method"]: row for row in results.find(context=context, batch=batch)}

    def is_whole(rows: dict[str, dict[str, Any]]) -> bool:
        whole = args.no_first_tokens or all("first_token_s" in row for row in rows.values())
        extended = all(row.get("extend") == args.extend or not can_extend(name) for name, row in rows.items())
        return rows.keys() >= set(methods) and whole and (extended or not args.extend)

    pairs = itertools.product(dict.fromkeys(args.contexts), dict.fromkeys(args.batch_sizes))
    cells = [pair for pair in pairs if not is_whole(had(*pair))]
    if not cells:
        return
    model = open_model(args.model, args.layers, args.dtype, args.device)
    # The methods of a cell are measured in turn, so an incomplete cell is measured again as a whole.
    plans = [
        BenchPlan(
            tuple(dict.fromkeys([*had(*pair), *methods])), args.rounds, args.lowering, not args.no_first_tokens,
            args.extend,
        )
        for pair in cells
    ]  # fmt: skip
    turns = sum(len(plan.methods) * (2 if plan.prompts else 1) + args.rounds for plan in plans)
    with tqdm(total=turns, file=sys.stderr, desc="specache bench", unit="turn") as bar:
        for (context, batch), plan in zip(cells, plans, strict=True):
            rows = cell(model, context, batch, plan, bar)
            results.drop(context=context, batch=batch)
            results.add(*rows)


def report(results: Results, args: argparse.Namespace) -> None:
    """Print the tables and draw the plot."""
    rows, origin = results.rows, results.report["provenance"]
    if not rows:
        return
    print(steps_table(rows))
    print(f"\n{args.model}, {args.dtype}, {origin['device']}, {origin['threads']} threads, torch {origin['torch']}")
    if args.plot:
        draw(rows, args.plot)
        print(f"written: {args.plot}", file=sys.stderr)
