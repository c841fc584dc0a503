"""The table of docs/gpu.md from the results of gpu_decode.py.

    python benchmarks/gpu_table.py    (--out benchmarks/results/gpu_table.json reads the results in that folder)

Each measured step has its predicted time next to it (`explaining/times`). The last line is for break_even.py.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

from computed_steps import traced
from gpu_decode import FP8, GIB, METHODS, NEVER_CAPTURED, SPECACHE, STATIC, break_even

from specache_compile.explaining.times.devices import Device, device_called
from specache_compile.explaining.times.step_time import full_step_of, step_of

HEADERS = (
    "cache", "sequences", "ms per step, measured", "ms per step, simulated", "tokens/s of all",
    "tokens/s relative to our 16-bit cache", "PCIe, MB per step", "share of the roofline",
)  # fmt: skip
# Bytes a number has in the caches of others that are computed too, as if attention read them at the memory's rate.
STORED = {STATIC: 2, FP8: 1}
# The method whose tokens a second the others' are compared with.
OURS_IN_16_BITS = "16 bits, k = 0"
# The caches' names in the tables; the others keep theirs.
NAMES = {
    "specache best": "specache",
    OURS_IN_16_BITS: "our 16-bit cache",
    FP8: "FP8 StaticCache, compiled",
}


def why_no_figures(report: dict[str, Any]) -> str | None:
    """Why nothing in a report may be taken for what a GPU does; None where it may."""
    if report["settings"].get("smoke"):
        return "a smoke run's"
    return "a simulated device's" if "simulated" in report["provenance"]["device"] else None


def tables(report: dict[str, Any]) -> str:
    """A Markdown table for each model, context and cap: every method with one row, and at its largest batch."""
    rows = report["rows"]
    keys = list(dict.fromkeys((row["model"], row["context"], row["cap"]) for row in rows))
    parts = [f"{report['provenance']['device']}, torch {report['provenance']['torch']}"] if rows else []
    for model, context, cap in keys:
        same = [row for row in rows if (row["model"], row["context"], row["cap"]) == (model, context, cap)]
        parts.append(f"{model}, {context:,} tokens, {cap / GIB:.0f} GiB of VRAM:")
        parts.append(table(same))
    return "\n\n".join(parts)


@functools.cache
def traced_as(method: str) -> Any:
    return traced(SPECACHE[method])


def computed_ms(row: dict[str, Any], device: Device) -> float | None:
    """What `explain` computes for a measured step of Llama-3-8B; of a compiled static cache, for an attention that
    reads no more than is stored. None of other caches that are none of ours, and of a step that is never captured."""
    method, size = row["method"], (row["context"], row["batch"])
    if row["model"] != "llama-3-8b":
        return None
    if method in STORED:
        return 1e3 * full_step_of(traced_as("specache best"), device, *size, STORED[method]).seconds
    if method not in SPECACHE or method in NEVER_CAPTURED:
        return None
    return 1e3 * step_of(traced_as(method), device, *size).seconds


def table(rows: list[dict[str, Any]]) -> str:
    """A line for one sequence and one for the largest batch of each method, of several reuses the one measured first.
    A column that no line fills is left out."""
    first = {(row["method"], row["at"]): row for row in reversed(rows)}
    lines = [
        line_of(first[method, at], first.get((OURS_IN_16_BITS, at)))
        for method in METHODS for at in ("1", "largest") if (method, at) in first
    ]  # fmt: skip
    kept = [column for column in range(len(HEADERS)) if any(line[column] for line in lines)]
    return markdown(tuple(HEADERS[i] for i in kept), [tuple(line[i] for i in kept) for line in lines])


def line_of(row: dict[str, Any], base: dict[str, Any] | None) -> tuple[str, ...]:
    """HEADERS of one measured step; base: our 16-bit cache's row of the same kind."""
    computed = row.get("computed ms")
    return (
        NAMES.get(row["method"], row["method"]), f"{row['batch']}", f"{row['ms']:.1f}",
        f"{computed:.1f}" if computed else "", f"{row['tokens/s']:,.0f}",
        f"{row['tokens/s'] / base['tokens/s']:.2f}" if base else "", f"{row.get('bytes to device', 0) / 1e6:,.0f}",
        f"{row['roofline share']:.0%}",
    )  # fmt: skip


def markdown(headers: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [headers, ("---", *["--:"] * (len(headers) - 1)), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_table.json")
    args = parser.parse_args(arguments)
    report = json.loads((args.out.parent / "gpu_decode.json").read_text())
    no_figures, name = why_no_figures(report), report["provenance"]["device"]
    least = break_even(report["rows"]) if no_figures is None else None
    device = device_called(name) if no_figures is None else None
    for row in report["rows"] if device else []:
        row["computed ms"] = computed_ms(row, device)
    found = {"device": name, "break-even": least, "tables": tables(report)}
    args.out.write_text(json.dumps({**found, "no figures": no_figures}, indent=1) + "\n")
    print(found["tables"], end="\n\n")
    if no_figures is not None:
        print(f"no figures: these are {no_figures}, which mean nothing")
    else:
        print(f"in break_even.py: MEASURED = {{{name!r}: {least}}}" if least else "no break-even was measured")


if __name__ == "__main__":
    main()
