"""The table of GPU figures in docs/gpu.md, from what gpu_decode.py measured, and what break_even.py should say.

python benchmarks/gpu_table.py [--out benchmarks/results/gpu_table.json]    reads gpu_decode.json beside it
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from gpu_decode import GIB, METHODS, break_even

HEADERS = (
    "", "largest batch", "tokens/s", "ms", "of a 16-bit step of ours", "PCIe, MB a step", "ms waited", "roofline",
    "CUDA graph",
)  # fmt: skip
# The method whose tokens a second the others' are compared with.
OURS_IN_16_BITS = "16 bits, k = 0"


def why_no_figures(report: dict[str, Any]) -> str | None:
    """Why nothing in a report may be taken for what a GPU does; None where it may."""
    if report["settings"].get("smoke"):
        return "a smoke run's"
    return "a simulated device's" if "simulated" in report["provenance"]["device"] else None


def tables(report: dict[str, Any]) -> str:
    """A Markdown table for each model, context and cap: every method at its largest batch."""
    rows = [row for row in report["rows"] if row["at"] == "largest"]
    keys = list(dict.fromkeys((row["model"], row["context"], row["cap"]) for row in rows))
    parts = [f"{report['provenance']['device']}, torch {report['provenance']['torch']}"] if rows else []
    for model, context, cap in keys:
        same = [row for row in rows if (row["model"], row["context"], row["cap"]) == (model, context, cap)]
        parts.append(f"{model}, {context:,} tokens, {cap / GIB:.0f} GiB of VRAM, batches as large as they fit:")
        parts.append(table(same))
    return "\n\n".join(parts)


def table(rows: list[dict[str, Any]]) -> str:
    """One of them, its rows in the methods' order; of several reuses the one that was measured first."""
    first = {row["method"]: row for row in reversed(rows)}
    base = first.get(OURS_IN_16_BITS)
    lines = [HEADERS, ("---", *["--:"] * (len(HEADERS) - 1))]
    for method in (method for method in METHODS if method in first):
        row = first[method]
        lines.append(
            (
                method, f"{row['batch']}", f"{row['tokens/s']:,.0f}", f"{row['ms']:.1f}",
                f"{row['tokens/s'] / base['tokens/s']:.2f}" if base else "",
                f"{row.get('bytes to device', 0) / 1e6:,.0f}", f"{row['waited']:.1f}" if "waited" in row else "",
                f"{row['roofline share']:.0%}", "yes" if row["captured"] else "no",
            )
        )  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_table.json")
    args = parser.parse_args(arguments)
    report = json.loads((args.out.parent / "gpu_decode.json").read_text())
    no_figures = why_no_figures(report)
    least = break_even(report["rows"]) if no_figures is None else None
    found = {"device": report["provenance"]["device"], "break-even": least, "tables": tables(report)}
    args.out.write_text(json.dumps({**found, "no figures": no_figures}, indent=1) + "\n")
    print(found["tables"])
    if no_figures is not None:
        print(f"\nno figures: these are {no_figures}, which mean nothing")
        return
    print(
        f"\nin break_even.py: MEASURED = {{{found['device']!r}: {least}}}" if least else "\nno break-even was measured"
    )
    print("in docs/gpu.md: python tools/doc_tables.py --write")


if __name__ == "__main__":
    main()
