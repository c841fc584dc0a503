"""The arguments of `specache eval`."""

from __future__ import annotations

import argparse
from pathlib import Path

from specache_compile.checkpoints.names import MODEL

from .arguments import LOWERINGS, add_device, add_dtype, whole

TASKS = ("needle", "perplexity", "closeness", "long")
METHODS = ("uncompiled", "kivi:bits=1", "specache:bits=1,setting=paper", "specache")

EPILOG = """\
examples:
  specache eval smollm2-135m --tasks needle --lengths 512 --samples 4
  specache eval smollm2-135m --tasks closeness --methods kivi:bits=2 specache --out build/closeness
"""


def add_eval(command: argparse.ArgumentParser) -> None:
    """The arguments of `specache eval`."""
    command.epilog = EPILOG
    command.add_argument("model", help=MODEL)
    command.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=["needle"], metavar="TASK",
        help=f"{', '.join(TASKS)} (default: needle); examples/harness.py runs LongBench and RULER",
    )  # fmt: skip
    command.add_argument(
        "--methods", nargs="+", default=list(METHODS), metavar="NAME[:option=value,...]",
        help=f"uncompiled, or a method with its options (default: {' '.join(METHODS)})",
    )  # fmt: skip
    command.add_argument(
        "--lengths", nargs="+", type=whole, default=[512, 1024], metavar="N",
        help="context lengths in tokens, including the answer (default: 512 1024)",
    )  # fmt: skip
    command.add_argument("--samples", type=whole, default=22, help="questions or windows per table cell (%(default)s)")
    command.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    command.add_argument(
        "--text", nargs="+", type=Path, default=[], metavar="FILE",
        help="texts for needle and perplexity (default: library source that the needle model was not trained on)",
    )  # fmt: skip
    command.add_argument("--chat", action="store_true", help="apply the chat template to the prompts of needle")
    command.add_argument(
        "--keys", type=int, choices=range(1, 9), default=0, metavar="1..8",
        help="named pass keys in a prompt of needle, one of which is requested (default: one key without a name)",
    )  # fmt: skip
    command.add_argument(
        "--blind", action="store_true",
        help="prefill the context exactly, compress it once, and prefill the question afterwards; without --blind, "
        "context and question are one prompt. The default of the six eviction policies is eviction_block=prompt",
    )  # fmt: skip
    command.add_argument(
        "--share-prefills", action="store_true",
        help="prefill each prompt once, without compilation, for all methods with an exact prefill; saves time and "
        "stores the caches of a cell (at most half of the free memory)",
    )  # fmt: skip
    command.add_argument(
        "--prefill-chunk", type=whole, metavar="N",
        help="tokens of a prompt that are prefilled together; bounds the time and memory of sliding layers",
    )  # fmt: skip
    command.add_argument("--out", type=Path, default=Path("build/eval"), help="folder of the results (%(default)s)")
    command.add_argument("--batch-size", type=whole, default=8, help="most prompts in a batch (%(default)s)")
    add_device(command)
    add_dtype(command, "bfloat16")
    command.add_argument("--lowering", choices=LOWERINGS, help="default: inductor on a GPU, else eager")
    command.add_argument("--no-plots", action="store_true", help="write tables without plots")
