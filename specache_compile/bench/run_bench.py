"""Run `specache bench`: measure all methods in turn; resume after an interruption."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache

from specache_compile.checkpoints import names
from specache_compile.checkpoints.loaded import limit_of, placed, with_weights
from specache_compile.errors import SpecacheError

from .measurements import BenchPlan, cell, steps_behind
from .results import Results
from .runners import STATIC, can_extend, check_name
from .table import check_plot, draw, steps_table


def run_bench(args: argparse.Namespace, command: Sequence[str]) -> None:
    """Check the arguments, load the model, measure the missing rows, print the tables."""
    for name in args.methods:
        check_name(name)
    if args.extend > min(args.contexts):
        raise SpecacheError(f"--extend {args.extend}: give at most the shortest of --contexts")
    if args.plot:
        check_plot(args.plot)
    config = config_of(args.model, args.layers)
    methods = usable(args.methods, config)
    steps, limit = steps_behind(args.rounds), limit_of(config)
    if max(args.contexts) + steps > limit:
        raise SpecacheError(
            f"--contexts {max(args.contexts)}: the model has {limit:,} tokens, and {steps} steps follow"
        )
    device = torch.device(args.device)
    settings = {name: getattr(args, name) for name in ("model", "layers", "dtype", "lowering", "rounds")}
    settings["threads"] = torch.get_num_threads()
    results = Results(args.json, "specache", device, resume=True, given=command, **settings)
    try:
        measure_missing(args, methods, results)
    except KeyboardInterrupt:
        kept = f"the same command resumes from {args.json}" if args.json else "--json FILE keeps finished contexts"
        print(f"interrupted: {kept}", file=sys.stderr)
        raise
    finally:
        report(results, args)


def config_of(name: str, layers: int | None) -> Any:
    """The config of a checkpoint or a config.json, cut to `layers` layers."""
    config = names.config_of(name)
    if layers is not None:
        text = config.get_text_config()
        if layers > text.num_hidden_layers:
            raise SpecacheError(f"--layers {layers}: the model has {text.num_hidden_layers} layers; give at most that")
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    return config


def open_model(name: str, layers: int | None, dtype: str, device: str) -> Any:
    """The model on its device, in `dtype`, for inference; with random weights for a config, or with fewer layers."""
    if not name.endswith(".json") and layers is None:
        names.print_origin(name)
        return placed(with_weights(names.resolved(name), dtype=dtype), device)
    torch.manual_seed(0)
    return placed(AutoModelForCausalLM.from_config(config_of(name, layers), dtype=dtype), device)


def usable(methods: Sequence[str], config: Any) -> list[str]:
    """The methods. A static cache is left out if the model has sliding layers, and the reason is printed."""
    if STATIC not in methods or not any(DynamicCache(config=config).is_sliding):
        return list(methods)
    print(f"{STATIC}: left out: the model has sliding layers, whose cache only a prefill can fill", file=sys.stderr)
    kept = [name for name in methods if name != STATIC]
    if not kept:
        raise SpecacheError("--methods: none of them is available on this machine, for the reason above")
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
    rest = (args.rounds, args.lowering, not args.no_first_tokens, args.extend)
    plans = [BenchPlan(tuple(dict.fromkeys([*had(*pair), *methods])), *rest) for pair in cells]
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
