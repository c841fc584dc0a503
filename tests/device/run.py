"""Run a command in which torch has a CUDA device that is simulated: `python tests/device/run.py -- pytest -m gpu`.

The command's programs are looked for beside this Python first. What is simulated, and what is not: README.md beside
this file.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from build import BUILT, Unusable, built_library

HOOKS = Path(__file__).parent / "hooks"


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run a command with a simulated CUDA device.")
    parser.add_argument("--device", choices=["h100", "a100", "rtx4090"], default="h100", help="which one to be")
    parser.add_argument("--devices", type=int, default=1, help="how many of them")
    parser.add_argument("--schedule", default="eager", help="eager, late, early or random:SEED: when queued work runs")
    parser.add_argument("command", nargs="+", help="behind --: what to run")
    return parser.parse_args(arguments)


def before(folder: object, name: str) -> str:
    """Return a search path with this folder in front."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get(name)]))


def environment(given: argparse.Namespace, library: Path) -> dict[str, str]:
    return {
        **os.environ,
        "SIMULATED_DEVICE": given.device,
        "SIMULATED_DEVICES": str(given.devices),
        "SIMULATED_SCHEDULE": given.schedule,
        "LD_PRELOAD": before(library / "libcuda.so.1", "LD_PRELOAD"),
        "TRITON_LIBCUDA_PATH": str(library),
        "PYTHONPATH": before(HOOKS, "PYTHONPATH"),
        "PATH": before(Path(sys.executable).parent, "PATH"),
        # Compiled kernels of simulated devices have a separate cache, and compile in this process.
        "TRITON_CACHE_DIR": str(BUILT / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(BUILT / f"inductor-{given.device}"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def main(arguments: list[str]) -> None:
    given = parsed(arguments)
    try:
        library = built_library()
    except Unusable as error:
        sys.exit(f"no simulated device: {error}")
    os.execvpe(given.command[0], given.command, environment(given, library))


if __name__ == "__main__":
    main(sys.argv[1:])
