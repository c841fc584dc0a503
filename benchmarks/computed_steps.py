"""Computed decode steps of Llama-3-8B on the devices of `specache explain`; nothing is measured.

    python benchmarks/computed_steps.py    (half a minute; --host-gib 512 changes the host memory of 100 GiB)
    python benchmarks/computed_steps.py --devices H200 --vram-gib 75 --out build/h200.json    (a part of its memory)

docs/explain.md describes the simulation and its estimates. `runtime/break_even.py` stores the resulting break-even
contexts; tests/test_benchmarks.py compares them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm
from transformers import LlamaConfig

import specache_compile as sc
from specache_compile.bench.results import provenance
from specache_compile.explaining.times.devices import DEVICES, Device
from specache_compile.explaining.times.step_kernels import Traced
from specache_compile.explaining.times.step_time import (
    LENGTHS,
    break_even_context,
    full_cache_batch,
    largest_batch,
    step_of,
)

# Llama-3-8B: layers, of which three are traced, and bytes of weights.
LAYERS, WEIGHTS = 32, 2 * 8_030_261_248
FULL = {"16 bits": 2, "fp8": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "KIVI, 2 bits": {"method": "kivi", "bits": 2, "host_tier": False},
    "as in SpeCache's paper, 2 bits": {"setting": "paper"},
    "default, two lanes, 16 bits on the host": {"speculate": True, "host_bits": 16},
    "default": {},
}
CACHES = (*FULL, *OPTIONS)


def traced(options: Mapping[str, Any]) -> Traced:
    """The step under these options, as if of all layers."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=3, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=131072, dtype=torch.bfloat16,
    )  # fmt: skip
    explained = sc.explain(config, 32_768, options=options)
    return replace(explained.traced(), weights=WEIGHTS, layers=LAYERS)


def rows_of(device: Device, steps: Mapping[str, Traced], host: float) -> Iterator[dict[str, Any]]:
    """Each cache at each length: a step of one row, and at the largest batch, where one fits."""
    plain = steps["default"]
    for length in LENGTHS:
        for cache in CACHES:
            if cache in FULL:
                most, limit = full_cache_batch(plain, device, length, FULL[cache]), "device"
            else:
                most, limit = largest_batch(steps[cache], device, length, host)
            for batch in dict.fromkeys((1, most)):
                if not 0 < batch <= most:
                    continue
                step = step_of(steps.get(cache, plain), device, length, batch, FULL.get(cache, 0))
                yield {
                    "device": device.name, "length": length, "cache": cache, "batch": batch, "limit": limit,
                    "ms": 1e3 * step.seconds, "exposed ms": 1e3 * step.exposed, "bound": step.bound,
                    "tokens/s": batch / step.seconds,
                }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host-gib", type=float, default=100.0, help="GiB of host memory (100)")
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=list(DEVICES), help="(all that explain knows)")
    parser.add_argument("--vram-gib", type=float, help="GiB of device memory to use (all of each device)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "computed_steps.json")
    args = parser.parse_args(arguments)
    steps = {name: traced(options) for name, options in tqdm(OPTIONS.items(), "traced", disable=None)}
    rows, contexts = list[dict[str, Any]](), dict[str, dict[str, int | None]]()
    for name in tqdm(args.devices, "computed", disable=None):
        device = DEVICES[name]
        device = replace(device, vram_gib=args.vram_gib or device.vram_gib)
        rows += rows_of(device, steps, args.host_gib * 2**30)
        contexts[name] = {cache: break_even_context(steps[cache], steps["default"], device) for cache in OPTIONS}
    settings = {"model": "Llama-3-8B's shape", "host GiB": args.host_gib, "device GiB": args.vram_gib or "all"}
    report = {"provenance": provenance(torch.device("cpu"), "benchmarks/computed_steps.py"), "settings": settings}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**report, "break-even": contexts, "rows": rows}, indent=1) + "\n")
    print(tabulate(rows, headers="keys", floatfmt=",.1f"))
    print(f"computed, not measured; {args.host_gib:g} GiB of host memory")
    for name, found in contexts.items():
        listed = ", ".join(f"{cache} {tokens or 'never'}" for cache, tokens in found.items())
        print(f"{name}: tokens from which a step of one row takes no longer than in 16 bits: {listed}")


if __name__ == "__main__":
    main()
