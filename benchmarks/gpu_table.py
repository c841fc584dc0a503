"""The tables of docs/gpu.md from the results of gpu_decode.py, gpu_prefill.py and gpu_kernels.py.

    python benchmarks/gpu_table.py    (--out benchmarks/results/gpu_table.json reads the results in that folder)

Each measured step has its predicted time next to it (`explaining/times`). The last lines are for break_even.py.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

from baselines import FP8, STATIC
from computed_steps import traced
from gpu_decode import GIB, METHODS, NEVER_CAPTURED, SPECACHE, break_even
from gpu_prefill import of_plain, plain_rows

from specache_compile.explaining.times.devices import Device, device_called
from specache_compile.explaining.times.step_time import full_step_of, step_of

HEADERS = (
    "cache", "sequences", "ms per step, measured", "ms per step, simulated", "tokens/s of all",
    "tokens/s relative to our 16-bit cache", "PCIe, MB per step", "ms waiting for PCIe", "share of the roofline",
)  # fmt: skip
# Kernels at the largest of the measured sizes, by the names of gpu_kernels.py.
KERNELS = ("attention", "scores alone", "attention from scores", "selection", "gather", "quantise")
PREFILL_HEADERS = (
    "compiler", "prefill, ms", "relative to torch.compile", "peak memory, GiB", "predicted peak, GiB",
)  # fmt: skip
KERNEL_HEADERS = ("kernel", "bits of keys, values", "µs", "GB/s", "share of the copy's rate")
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
    reads no more than is stored. None of other caches that are none of ours, of a step that is never captured, and of a
    fetch that is made to wait."""
    method, size = row["method"], (row["context"], row["batch"])
    if row["model"] != "llama-3-8b":
        return None
    if method in STORED:
        return 1e3 * full_step_of(traced_as("specache best"), device, *size, STORED[method]).seconds
    if method not in SPECACHE or method in NEVER_CAPTURED or "synchronous" in method:
        return None
    return 1e3 * step_of(traced_as(method), device, *size).seconds


def table(rows: list[dict[str, Any]]) -> str:
    """A line for one sequence and one for the largest batch of each method; of several reuses the one measured first.
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
        f"{row['waited']:.1f}" if "waited" in row else "", f"{row['roofline share']:.0%}",
    )  # fmt: skip


def prefill_table(report: dict[str, Any]) -> str:
    """A prefill of one row at the longest measured context."""
    context, plain = max(row["context"] for row in report["rows"]), plain_rows(report["rows"])
    lines = [
        (
            NAMES.get(row["method"], row["method"]), f"{row['ms']:,.0f}", of_plain(row, plain),
            f"{row['peak bytes'] / GIB:.2f}", f"{row['predicted bytes'] / GIB:.2f}",
        )
        for row in report["rows"] if row["context"] == context
    ]  # fmt: skip
    told = f"llama-3-8b, a prefill of one sequence of {context:,} tokens; memory next to the weights:"
    return f"{told}\n\n{markdown(PREFILL_HEADERS, lines)}"


def kernel_table(report: dict[str, Any]) -> str:
    """Each kernel at the largest batch and context that were measured."""
    context, batch = (max(row[size] for row in report["rows"]) for size in ("context", "batch"))
    rows = [row for row in report["rows"] if (row["context"], row["batch"]) == (context, batch)]
    lines = [
        (
            row["kernel"] + (f", reuse {row['reuse']:.0%}" if "reuse" in row else ""),
            low_bit_of(row),
            f"{1e3 * row['ms']:,.0f}", f"{row['GB/s']:,.0f}", f"{row['share']:.0%}",
        )
        for kernel in KERNELS for row in rows if row["kernel"] == kernel
    ]  # fmt: skip
    copy, link = (report["limits"][name] for name in ("copy", "to device"))
    told = (
        f"One layer, {batch} rows of {context:,} tokens. A copy: {copy:,.0f} GB/s within the device, {link:.0f} to it:"
    )
    return f"{told}\n\n{markdown(KERNEL_HEADERS, lines, left=2)}"


def low_bit_of(row: dict[str, Any]) -> str:
    keys = "1 in the trellis" if row["key_code"] == "trellis" else row["bits"]
    return f"{keys}, {row['value_bits']}" + (", rotated" if row["rotated"] else "")


def markdown(headers: tuple[str, ...], rows: list[tuple[str, ...]], left: int = 1) -> str:
    lines = [headers, (*["---"] * left, *["--:"] * (len(headers) - left)), *rows]
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
    found = {"device": name, "break-even": least, "tables": tables(report), "more": ""}
    for other, told in (("gpu_prefill.json", prefill_table), ("gpu_kernels.json", kernel_table)):
        if (path := args.out.parent / other).exists():
            measured = json.loads(path.read_text())
            if why_no_figures(measured) is None and measured["provenance"]["device"] == name:
                found["more"] += f"\n\n{told(measured)}"
    args.out.write_text(json.dumps({**found, "no figures": no_figures}, indent=1) + "\n")
    print(found["tables"] + found["more"])
    if no_figures is not None:
        print(f"\nno figures: these are {no_figures}, which mean nothing")
        return
    print(
        f"\nin break_even.py: MEASURED = {{{found['device']!r}: {least}}}" if least else "\nno break-even was measured"
    )
    print("in docs/gpu.md: gpu_*.json go into benchmarks/results, then python tools/doc_tables.py --write")


if __name__ == "__main__":
    main()
