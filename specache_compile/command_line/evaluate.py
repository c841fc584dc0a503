"""The arguments of `specache eval`."""

from __future__ import annotations

import argparse
from pathlib import Path

from specache_compile.checkpoints.loaded import DTYPES
from specache_compile.checkpoints.names import MODEL

from .arguments import LOWERINGS, add_device

TASKS = ("needle", "perplexity", "closeness", "long")
METHODS = ("uncompiled", "kivi:bits=1", "specache:bits=1,setting=paper", "specache")


def add_eval(command: argparse.ArgumentParser) -> None:
    """The arguments of `specache eval`."""
    command.add_argument("model", help=MODEL)
    command.add_argument(
        "--tasks",
        nargs="+",
        choices=TASKS,
        default=["needle"],
        metavar="TASK",
        help=f"some of {', '.join(TASKS)} (default: needle); examples/harness.py runs LongBench and RULER",
    )
    command.add_argument(
        "--methods", nargs="+", default=list(METHODS), metavar="NAME[:option=value,...]",
        help=f"uncompiled, or a method with its options (default: {' '.join(METHODS)})",
    )  # fmt: skip
    command.add_argument(
        "--lengths", nargs="+", type=int, default=[512, 1024], metavar="N",
        help="contexts in tokens, answer included (512 1024)",
    )  # fmt: skip
    command.add_argument("--samples", type=int, default=22, help="questions, or windows of text, a cell (default: 22)")
    command.add_argument("--seed", type=int, default=0, help="of every draw (default: 0)")
    command.add_argument(
        "--text", nargs="+", type=Path, default=[], metavar="FILE",
        help="texts for haystacks and perplexity (default: library source held out of training)",
    )  # fmt: skip
    command.add_argument("--chat", action="store_true", help="put the chat template around the needles' prompts")
    command.add_argument(
        "--blind", action="store_true",
        help="read the context exactly, evict from it once or quantise it, and only then read the question; without "
        "--blind both are one prompt. The six policies take eviction_block=prompt, unless "
        "another is given",
    )  # fmt: skip
    command.add_argument(
        "--share-prefills", action="store_true",
        help="read each prompt once, uncompiled, and give the cache to every method that reads prompts exactly: long "
        "prompts take a fraction of the time, for the memory of a cell's caches (at most half of what is free)",
    )  # fmt: skip
    command.add_argument("--out", type=Path, default=Path("build/eval"), help="folder of the results (%(default)s)")
    command.add_argument("--batch-size", type=int, default=8, help="most prompts of one length at once (default: 8)")
    add_device(command)
    command.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and cache (default: bfloat16)")
    command.add_argument("--lowering", choices=LOWERINGS, help="default: inductor on a GPU, else eager")
    command.add_argument("--no-plots", action="store_true", help="tables only")
