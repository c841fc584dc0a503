"""The `specache` command: demo, generate, chat, bench, explain, serve, eval.

A command's modules are imported only when its arguments are valid: torch takes seconds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .checkpoints.loaded import usable_device
from .checkpoints.names import MODEL, check_name, tell_origin
from .command_line.arguments import (
    Parser,
    add_device,
    add_option_names,
    add_options,
    has_options,
    has_other_methods,
    is_help,
    options_of,
    suggestion,
)
from .errors import OptionError, SpecacheError, first_line

DESCRIPTION = "SpeCache as a torch.compile backend: 16-bit KV cache on the host, 1 or 2 bits on the device."


EXPLAIN_EPILOG = """\
examples:
  specache explain smollm2-135m --prompt-length 8192
  specache explain smollm2-135m --prompt-length 8192 --layer 0
  specache explain meta-llama/Llama-3.1-8B --device H100 --bits 1 --save report.html

It also accepts the backend's options; `specache generate --help-all` lists them. docs/explain.md describes other
devices (--hbm-gbps, --pcie-gbps, --tflops, --vram-gib) and assumptions (--reuse, --corrected, --accepted).
"""


@dataclass(frozen=True)
class Command:
    """A command.

    help: its line in `specache --help`.
    add, run: "module:function" that adds its arguments, and that runs it.
    shown: the flags in its --help, if --help-all has more.
    options: whether it accepts the backend's options.
    checkpoint: whether its first argument is a checkpoint that `add` does not declare.
    recorded: whether its results contain the command line.
    """

    help: str
    add: str
    run: str
    shown: tuple[str, ...] = ()
    options: bool = False
    checkpoint: bool = False
    recorded: bool = False


COMMANDS = {
    "demo": Command(
        "measure keys found, bytes and times of a real model in a few minutes",
        "command_line.demo:add_demo", "demo.command:run_demo", recorded=True,
    ),
    "generate": Command(
        "continue a prompt with a compiled checkpoint",
        "command_line.generate:add_generate", "command_line.generate:run_generate", options=True,
        shown=("--prompt", "--prompt-file", "--chat", "--max-new-tokens", "--temperature", "--top-p", "--dtype",
               "--device", "--stats", "--bits", "--verify"),
    ),
    "chat": Command(
        "chat with a compiled checkpoint in the terminal",
        "command_line.chat:add_chat", "command_line.chat:run_chat", options=True,
        shown=("--system", "--max-new-tokens", "--temperature", "--top-p", "--dtype", "--device", "--stats", "--bits",
               "--verify"),
    ),
    "bench": Command(
        "measure decode steps, first tokens and bytes of several caches",
        "command_line.bench:add_bench", "bench.command:run_bench", recorded=True,
    ),
    "explain": Command(
        "print what is rewritten, and all bytes and times, without weights and GPU",
        "cli:add_explain", "cli:run_explain", options=True,
    ),
    "serve": Command(
        "serve a compiled checkpoint with OpenAI's API",
        "serving.serve:add_serve", "serving.serve:run_serve", options=True, checkpoint=True,
        shown=("--host", "--port", "--api-key", "--rows", "--session-host-gib", "--session-device-gib",
               "--session-folder", "--device", "--bits", "--method", "--verify"),
    ),
    "eval": Command(
        "evaluate methods on tasks: a table, CSV, JSON and plots; resumable",
        "command_line.evaluate:add_eval", "evaluation.command:run_eval", recorded=True,
    ),
}  # fmt: skip


def parser(words: Sequence[str], declared: bool) -> tuple[Parser, Parser | None]:
    """The command line's parser with the arguments of the command in `words`, and that command's own parser.

    Args:
        words: the command line's words.
        declared: add the backend's options with their types and help, which imports torch.
    """
    top = Parser(prog="specache", description=DESCRIPTION)
    top.add_argument("--version", action="store_true", help="print the version")
    commands = top.add_subparsers(dest="command", required=True, metavar=f"{{{','.join(COMMANDS)}}}")
    own = None
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help)
        if name == words[0]:
            own = sub
            fill(own, command, declared, whole="--help-all" in words)
    return top, own


def fill(own: Parser, command: Command, declared: bool, whole: bool) -> None:
    """Add a command's arguments. whole: its help lists all of them."""
    if command.checkpoint:
        own.add_argument("model", metavar="MODEL", help=MODEL)
    function(command.add)(own)
    if not command.options:
        return
    if command.shown:
        add_device(own)
        own.add_argument("--help-all", action="help", help="show every option, also those of the backend")
    if declared:
        add_options(own, shown=bool(command.shown))
    else:
        add_option_names(own)
    if command.shown and not whole:
        own.shorten(command.shown)


def function(place: str) -> Callable[..., Any]:
    module, name = place.split(":")
    return getattr(importlib.import_module(f"specache_compile.{module}"), name)


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The arguments. A usage error ends the process with one line, usually before torch is imported."""
    if not words or (not words[0].startswith("-") and words[0] not in COMMANDS):
        top, _ = parser([""], declared=False)
        if not words:
            top.error(f"no command; the commands are {', '.join(COMMANDS)}")
        top.error(f"unknown command {words[0]}{suggestion(words[0], COMMANDS)}")
    declared = is_help(words) or has_other_methods()
    top, own = parser(words, declared)
    if own is None:
        top.check_flags(words)
    else:
        own.check_flags(words[1:])
    args = top.parse_args(words)
    if COMMANDS[args.command].options and has_options(args) and not declared:
        args = parser(words, declared=True)[0].parse_args(words)
    return args


def add_explain(command: Parser) -> None:
    """The arguments of `explain`; its help lists the common ones, and a page with the others."""
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.epilog = EXPLAIN_EPILOG
    command.add_argument("model", help=f"{MODEL}; or a config.json")
    command.add_argument("--prompt-length", type=int, default=4096, help="tokens of context (default: 4096)")
    command.add_argument("--batch-size", type=int, default=1, help="rows (default: 1)")
    command.add_argument("--device", help="A6000, A100, H100, H200, RTX 4090 or L4 (default: A100)")
    command.add_argument("--host-gib", type=float, default=128.0, help="GiB of host memory (default: 128)")
    command.add_argument(
        "--ranks", type=int, default=1, help="explain one of so many ranks that share the model (default: 1)"
    )
    for name in ("--hbm-gbps", "--pcie-gbps", "--tflops", "--vram-gib"):
        command.add_argument(name, type=float, help=argparse.SUPPRESS)
    for name, assumed in (("--reuse", None), ("--corrected", None), ("--accepted", None)):
        command.add_argument(name, type=float, default=assumed, help=argparse.SUPPRESS)
    shown = command.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="everything as JSON")
    shown.add_argument("--nodes", action="store_true", help="each launch of the decode step with its time")
    shown.add_argument("--graph", metavar="PHASE", help="print the rewritten graph: prefill, pre-decode or decode")
    shown.add_argument(
        "--diff", nargs=2, metavar=("PHASE", "PASS"), help="what a pass changed in a phase's graph, as a unified diff"
    )
    command.add_argument("--layer", type=int, metavar="N", help="only layer N; alone: before and after")
    command.add_argument("--after", metavar="PASS", help="with --graph: the graph as it stood after this pass")
    command.add_argument(
        "--save", action="append", default=[], type=Path, metavar="FILE",
        help="write report.html or timeline.json (Perfetto); may be repeated",
    )  # fmt: skip


def run_explain(args: argparse.Namespace, options: dict[str, Any]) -> None:
    from .explaining.explain import explain
    from .explaining.outline import readable_graph
    from .explaining.tables import nodes_table
    from .explaining.times.devices import find_device
    from .explaining.times.verification import ACCEPTED

    if args.after and not args.graph:
        raise SpecacheError("--after goes with --graph PHASE")
    tell_origin(args.model)
    figures = (args.hbm_gbps, args.pcie_gbps, args.tflops, args.vram_gib)
    explained = explain(
        args.model, args.prompt_length, args.batch_size, options,
        device=find_device(args.device, *figures), host_gib=args.host_gib, reuse=args.reuse, corrected=args.corrected,
        accepted=ACCEPTED if args.accepted is None else args.accepted, ranks=args.ranks,
    )  # fmt: skip
    explained = replace(explained, command=repeated(args, options))
    for path in args.save:
        explained.save(path)
        print(f"wrote {path}", file=sys.stderr)
    if args.json:
        print(json.dumps(explained.to_dict(), indent=1))
    elif args.nodes:
        print(nodes_table(explained))
    elif args.diff:
        print(explained.diff(args.diff[0], args.diff[1], args.layer), end="")
    elif args.graph:
        print(readable_graph(explained.graph(args.graph, args.after, args.layer)), end="")
    elif args.layer is not None:
        print(explained.layer(args.layer), end="")
    else:
        print(explained)


def repeated(args: argparse.Namespace, options: dict[str, Any]) -> str:
    """The command that explains the same model with the same options."""
    given = {"prompt_length": args.prompt_length, "device": args.device, **options}
    given |= {name: value for name, value in (("batch_size", args.batch_size), ("ranks", args.ranks)) if value > 1}
    words = ["specache", "explain", args.model]
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return shlex.join(words)


def run(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Run the command that the arguments name."""
    command = COMMANDS[args.command]
    if hasattr(args, "model"):
        check_name(args.model)
    if hasattr(args, "device") and args.command != "explain":  # whose device is the name of a GPU
        args.device = usable_device(args.device)
    if command.options:
        from .methods import parse_options

        options = options_of(args)
        parse_options(options)
        function(command.run)(args, options)
    elif command.recorded:
        function(command.run)(args, words)
    else:
        function(command.run)(args)


def main(arguments: list[str] | None = None) -> int:
    """Entry point. A usage error, a bad path, option or phase prints one line on stderr and returns 2."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--version"]:
        from . import __version__

        print(f"specache {__version__}")
        return 0
    args = parsed(words)
    try:
        run(args, words)
    except (SpecacheError, OptionError, OSError, ValueError) as error:
        print(f"specache: {first_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
