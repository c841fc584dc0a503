"""A day with a GPU in one command: the tests that need it, then its three benchmarks, each in a process of its own.

    python benchmarks/gpu.py                          everything, results into benchmarks/results
    python benchmarks/gpu.py --only tests kernels     some of it
    python benchmarks/gpu.py --out DIR --limit 540    where a command may not take longer than ten minutes

A step that fails, or runs past its limit, does not keep the next from running. `summary.json` has every step's outcome.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from measuring import provenance

ROOT = Path(__file__).parent.parent
# What decides comes first: bfloat16 of the Triton kernels, which no interpreter checks.
TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
STEPS = {
    "kernel tests": (*TESTS, "tests/kernels/test_triton.py"),
    "tests": (*TESTS, "-m", "gpu"),
    "kernels": ("benchmarks/gpu_kernels.py",),
    "prefill": ("benchmarks/gpu_prefill.py",),
    "decode": ("benchmarks/gpu_decode.py",),
}


def run(name: str, out: Path, limit: float | None, smoke: bool) -> dict[str, object]:
    """One step; its output goes to NAME.log and to the screen, its results to gpu_NAME.json."""
    more = [] if "pytest" in STEPS[name] else ["--out", str(out / f"gpu_{name}.json"), *(["--smoke"] if smoke else [])]
    start, code = time.monotonic(), -1
    print(f"\n{name}: python {' '.join(STEPS[name])}", flush=True)
    with (out / f"{name.replace(' ', '_')}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *STEPS[name], *more], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            printed, _ = process.communicate(timeout=limit)
            code = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            printed, _ = process.communicate()
            printed += f"\nkilled after {limit:.0f} s\n"
        log.write(printed)
    print(printed, flush=True)
    return {"step": name, "exit status": code, "seconds": round(time.monotonic() - start, 1)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP", help="; ".join(STEPS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    parser.add_argument("--limit", type=float, help="seconds for each step (default: none)")
    parser.add_argument("--smoke", action="store_true", help="tiny, to see that everything runs")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not args.smoke:
        parser.error("torch sees no CUDA device; --smoke runs everything small on the CPU")
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = {"provenance": provenance(device, "benchmarks/gpu.py"), "steps": []}
    for name in args.only:
        report["steps"].append(run(name, args.out.resolve(), args.limit, args.smoke))
        (args.out / "summary.json").write_text(json.dumps(report, indent=1) + "\n")
    failed = [step["step"] for step in report["steps"] if step["exit status"] != 0]
    print(f"\n{'all steps ended well' if not failed else 'failed: ' + ', '.join(failed)}; {args.out / 'summary.json'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
