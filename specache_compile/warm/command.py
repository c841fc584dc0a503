"""`specache cache` and `specache compile`: what processes have kept, and a checkpoint's forms before anyone asks."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from specache_compile.cache_folder import VARIABLE
from specache_compile.checkpoints.loaded import placed
from specache_compile.checkpoints.names import resolved, tell_origin
from specache_compile.errors import SpecacheError

from . import store

MIB = 1 << 20


def add_cache(command: argparse.ArgumentParser) -> None:
    command.add_argument("--clear", action="store_true", help="remove every form")


def run_cache(args: argparse.Namespace) -> None:
    """List the store's environments with their forms, bytes and last use, or clear it."""
    root = needed_folder()
    if args.clear:
        print(f"{root}: {store.clear(root) / MIB:.1f} MiB removed")
        return
    print(f"{root}, of at most {store.MOST_BYTES / MIB:,.0f} MiB")
    print(table(root) or "nothing is kept")


def table(root: Path) -> str:
    """A line for each environment, this process's own first; "" where there is none."""
    from tabulate import tabulate

    from .environment import environment

    found: dict[str, list[tuple[int, float]]] = {}
    for form, size, used in store.entries(root):
        found.setdefault(form.parent.parent.name, []).append((size, used))
    here = environment()
    lines = [
        (
            f"{name} (here)" if name == here else name, len(forms), f"{sum(size for size, _ in forms) / MIB:.1f}",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(max(used for _, used in forms))),
        )
        for name, forms in sorted(found.items(), key=lambda item: item[0] != here)
    ]  # fmt: skip
    if not lines:
        return ""
    return tabulate(lines, ("environment", "forms", "MiB", "last used"), disable_numparse=True)


def needed_folder() -> Path:
    root = store.folder()
    if root is None:
        raise SpecacheError(f"nothing is kept: set {VARIABLE} to a folder")
    return root


def add_compile(command: argparse.ArgumentParser) -> None:
    """The arguments of `specache compile`, but for the checkpoint, the device and the backend's options."""
    command.add_argument(
        "--prompt-length", type=int, default=2048, help="tokens of the longer of two prompts (default: %(default)s)"
    )


def run_compile(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Run the calls that a generation makes, and those of the next turn of a conversation, so that they are kept."""
    from transformers import AutoModelForCausalLM

    root = needed_folder()
    path = resolved(args.model)
    tell_origin(args.model)
    model = placed(AutoModelForCausalLM.from_pretrained(path, dtype="auto"), args.device)
    model.compile(backend="specache", options=options)
    before = {form for form, _, _ in store.entries(root)}
    for length in (64, args.prompt_length):
        converse(model, length)
    made = [size for form, size, _ in store.entries(root) if form not in before]
    print(f"{args.model}: {len(made)} forms kept in {root}, {sum(made) / MIB:.1f} MiB")


def converse(model: Any, length: int) -> None:
    """A prompt and its answer, and a second turn over what is cached of the first."""
    import torch

    from specache_compile.compat import cache_of, with_cache

    tokens = torch.randint(0, model.config.get_text_config().vocab_size, (1, length), device=model.device)
    how = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(tokens, **how)
    again = torch.cat([first.sequences, tokens[:, :32]], -1)
    model.generate(again, **with_cache(cache_of(first)), **how)
