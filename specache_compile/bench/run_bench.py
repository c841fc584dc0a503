"""Run `specache bench`: measure all methods in turn; resume after an interruption."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import psutil
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from specache_compile.checkpoints import names
from specache_compile.checkpoints.loaded import placed
from specache_compile.checkpoints.names import print_origin, resolved
from specache_compile.errors import SpecacheError

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


def config_of(name: str, layers: int | None) -> Any:
    """The config of a checkpoint or a config.json, cut to `layers` layers."""
    config = names.config_of(name)
    if layers is not None:
        text = config.get_text_config()
        if not 1 <= layers <= text.num_hidden_layers:
            raise SpecacheError(f"--layers {layers}: the model has {text.num_hidden_layers} layers; give at most that")
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    return config


def open_model(name: str, layers: int | None, dtype: str, device: str) -> Any:
    """The model on its device, in `dtype`, for inference; with random weights for a config, or with fewer layers."""
    if name.endswith(".json") or layers is not None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(name, layers), dtype=dtype)
        return placed(model.eval(), device)
    print_origin(name)
    return placed(AutoModelForCausalLM.from_pretrained(resolved(name), dtype=dtype), device)


def check_room(
    config: Any, contexts: list[int], steps: int, batches: list[int], runners: int, dtype: torch.dtype, device: str
) -> None:
    """Check the context and the memory before weights are loaded.

    SpecacheError if a context and its steps exceed the model's context, or if the weights and a cache for each runner
    exceed the free memory.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or 1 << 62
    if max(contexts) + steps > limit:
        raise SpecacheError(f"--contexts {max(contexts)}: the model has {limit:,} tokens, and {steps} steps follow")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights = sum(p.nbytes for p in model.parameters())
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    pair = 2 * heads * width * dtype.itemsize * text.num_hidden_layers
    required = weights + (runners + 1) * pair * max(contexts) * max(batches)
    free = torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else psutil.virtual_memory().available
    if required > free:
        raise SpecacheError(
            f"weights of {weights / 1e9:.1f} GB and {runners} caches of {max(contexts):,} tokens × {max(batches)} "
            f"require {required / 1e9:.1f} GB; {free / 1e9:.1f} GB are free: give fewer --methods or shorter --contexts"
        )


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
