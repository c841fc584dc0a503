"""Run everything that needs a GPU: probes, tests, benchmarks and the tables of docs/gpu.md. It is resumable.

    python benchmarks/gpu.py    (--limit 540 stops after nine minutes, --only kernels decode runs some steps)

Each step runs in a new process and may fail alone, except the probes. `summary.json` has the outcomes.
Exit status: 0, all steps are done; 3, the time limit is reached, run it again; 1, a step failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from specache_compile.bench.results import Results

ROOT = Path(__file__).parent.parent
FEWEST_CORES = 16  # from which on tests run side by side
# What decides comes first: bfloat16 of the Triton kernels, which no interpreter checks.
TESTS = {"kernel tests": "tests/kernels/test_triton.py", "tests": "tests/kernels/test_gpu.py"}
# Of them, in a smoke run, what a minute of an interpreter is enough for, by pytest's -k.
SMOKE_TESTS = {
    "kernel tests": "bfloat16 or selection_is_exactly or written_through",
    "tests": "host_tier_is_pinned or without_fetches",
}
BENCHMARKS = {
    name: f"benchmarks/gpu_{name}.py" for name in ("probe", "kernels", "prefill", "decode", "checkpoint", "table")
}
STEPS = ("probe", *TESTS, *(name for name in BENCHMARKS if name != "probe"))
DONE, FAILED, TIME_IS_UP = 0, 1, 3
# Seconds below which no step is worth its start.
SHORTEST = 20


def command(name: str, out: Path, smoke: bool) -> list[str]:
    """What runs a step, and goes on with what `out` has of it."""
    if name in BENCHMARKS:
        more = ["--resume", *(["--smoke"] if smoke else [])] if name != "table" else []
        return [sys.executable, BENCHMARKS[name], "--out", str(out / f"gpu_{name}.json"), *more]
    side_by_side = (os.cpu_count() or 1) >= FEWEST_CORES and importlib.util.find_spec("xdist") is not None
    return [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "gpu_tests",
        "--passed", str(out / f"{name.replace(' ', '_')}.passed"), *(["-n", "8"] if side_by_side else []), TESTS[name],
        *(["-k", SMOKE_TESTS[name]] if smoke else []),
    ]  # fmt: skip


def run(name: str, out: Path, limit: float | None, smoke: bool) -> dict[str, Any]:
    """One step; its output goes to NAME.log and to the screen, its results to gpu_NAME.json."""
    start, given = time.monotonic(), command(name, out, smoke)
    print(f"\n{name}: {' '.join(given)}", flush=True)
    path = os.pathsep.join(filter(None, [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]))
    with (out / f"{name.replace(' ', '_')}.log").open("a") as log:
        process = subprocess.Popen(
            given, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=limit)
            outcome = "done" if process.returncode == 0 else "failed"
            if process.returncode < 0:  # which leaves no word of its own
                printed += f"\nended by {signal.Signals(-process.returncode).name}\n"
        except subprocess.TimeoutExpired:
            process.kill()
            printed, _ = process.communicate()
            printed, outcome = f"{printed}\nkilled after {limit:.0f} s\n", "time was up"
        log.write(printed)
    print(printed, flush=True)
    return {"step": name, "outcome": outcome, "seconds": round(time.monotonic() - start, 1)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP", help="; ".join(STEPS))
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder (build/gpu)")
    parser.add_argument("--limit", type=float, help="seconds for this call (default: none)")
    parser.add_argument("--smoke", action="store_true", help="tiny, to see that everything runs")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not args.smoke:
        parser.error("torch sees no CUDA device; --smoke runs everything small on the CPU")
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    summary = Results(args.out / "summary.json", "benchmarks/gpu.py", device, resume=True, smoke=args.smoke)
    return day(args.only, args.out.resolve(), args.limit, args.smoke, summary)


def day(steps: list[str], out: Path, limit: float | None, smoke: bool, summary: Results) -> int:
    """Run what is not done yet, and the table, which is of what there is by then; returns the exit status."""
    end = None if limit is None else time.monotonic() + limit
    for name in [name for name in steps if name == "table" or not summary.has(step=name, outcome="done")]:
        left = None if end is None else end - time.monotonic()
        if left is not None and left < SHORTEST:
            break
        outcome = run(name, out, left, smoke)
        summary.rows[:] = [row for row in summary.rows if row["step"] != name]
        summary.add(outcome)
        if name == "probe" and outcome["outcome"] == "failed":
            print("the probe has failed: no other step means anything before that is understood")
            return FAILED
    outcomes = {row["step"]: row["outcome"] for row in summary.rows}
    failed = [name for name in steps if outcomes.get(name) == "failed"]
    left_over = [name for name in steps if outcomes.get(name, "time was up") == "time was up"]
    print(f"\ndone: {', '.join(name for name in steps if outcomes.get(name) == 'done') or 'nothing'}")
    print(*([f"failed: {', '.join(failed)}"] if failed else []), sep="\n")
    print(*([f"time was up: {', '.join(left_over)}; run the same again"] if left_over else []), sep="\n")
    return TIME_IS_UP if left_over else FAILED if failed else DONE


if __name__ == "__main__":
    sys.exit(main())
