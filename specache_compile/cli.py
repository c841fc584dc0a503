"""The `specache` command and its subcommands.

A subcommand's modules are imported when it is used, because importing torch takes seconds.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .checkpoints.loaded import usable_device
from .checkpoints.names import MODEL, checked, print_origin
from .command_line.arguments import Parser, add_device, add_options, gib, options_of, suggestion
from .errors import OptionError, SpecacheError, first_line

RAW = argparse.RawDescriptionHelpFormatter
DESCRIPTION = """\
Run Hugging Face decoders with a compressed KV cache: 1 or 2 bits on the GPU, all pairs in host memory.
`specache COMMAND --help` describes a command and shows an example."""


EXPLAIN_EPILOG = """\
examples:
  specache explain smollm2-135m --prompt-length 8192
  specache explain smollm2-135m --prompt-length 8192 --layer 0
  specache explain meta-llama/Llama-3.1-8B --device H100 --bits 1

The backend's options are accepted too: `specache generate --help-all` lists them.
"""


@dataclass(frozen=True)
class Command:
    """A subcommand.

    help: its line in `specache --help`.
    add, run: "module:function" that adds its arguments, and that runs it.
    shown: the flags that --help lists if --help-all lists more; empty if --help lists all.
    options: whether the backend's options are accepted.
    recorded: whether `run` gets the command line, which its results store.
    """

    help: str
    add: str
    run: str
    shown: tuple[str, ...] = ()
    options: bool = False
    recorded: bool = False


COMMANDS = {
    "demo": Command(
        "show the gain on a small model: keys found, memory and times; takes minutes",
        "command_line.bench:add_demo", "bench.demo:run_demo", recorded=True,
    ),
    "generate": Command(
        "continue a prompt",
        "command_line.generate:add_generate", "command_line.generate:run_generate", options=True,
        shown=("--prompt", "--prompt-file", "--chat", "--max-new-tokens", "--temperature", "--top-p", "--dtype",
               "--device", "--stats", "--bits", "--verify"),
    ),
    "bench": Command(
        "time decode steps and first tokens next to other KV caches",
        "command_line.bench:add_bench", "bench.run_bench:run_bench", recorded=True,
    ),
    "explain": Command(
        "predict memory and step times; needs no weights and no GPU",
        "cli:add_explain", "cli:run_explain", options=True,
    ),
    "serve": Command(
        "serve a model with the OpenAI API",
        "serving.serve:add_serve", "serving.serve:run_serve", options=True,
        shown=("--host", "--port", "--api-key", "--rows", "--session-host-gib", "--session-device-gib",
               "--session-folder", "--device", "--bits", "--method"),
    ),
    "eval": Command(
        "compare methods on tasks; a stopped evaluation resumes",
        "command_line.evaluate:add_eval", "evaluation.run_eval:run_eval", recorded=True,
    ),
}  # fmt: skip


def parser(words: Sequence[str]) -> tuple[Parser, Parser | None]:
    """The parser of the command line, and that of the command in `words`, if there is one; it alone has arguments."""
    top = Parser(prog="specache", description=DESCRIPTION, formatter_class=RAW)
    top.add_argument("--version", action="store_true", help="print the version")
    commands = top.add_subparsers(dest="command", required=True, metavar=f"{{{','.join(COMMANDS)}}}")
    own = None
    for name, command in COMMANDS.items():
        description = command.help[0].upper() + command.help[1:] + "."
        sub = commands.add_parser(name, help=command.help, description=description, formatter_class=RAW)
        if [name] == words[:1]:
            own = sub
            fill(own, command, whole="--help-all" in words)
    return top, own


def fill(own: Parser, command: Command, whole: bool) -> None:
    """Add a command's arguments. whole: its help lists all of them."""
    function(command.add)(own)
    if not command.options:
        return
    if command.shown:
        add_device(own)
        own.add_argument("--help-all", action="help", help="show every option, also those of the backend")
    add_options(own, shown=bool(command.shown))
    if command.shown and not whole:
        own.shorten(command.shown)


def function(place: str) -> Callable[..., Any]:
    module, name = place.split(":")
    return getattr(importlib.import_module(f"specache_compile.{module}"), name)


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The arguments. A usage error ends the process with one line."""
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    top, own = parser(words)
    if not words:
        top.error(f"no command; the commands are {', '.join(COMMANDS)}")
    if own is None and not words[0].startswith("-"):
        top.error(f"unknown command {words[0]}{suggestion(words[0], COMMANDS)}")
    (own or top).check_flags(words[1:] if own else words)
    return top.parse_args(words)


def add_explain(command: Parser) -> None:
    """The arguments of `specache explain`. Its help lists the common ones and names the others."""
    command.epilog = EXPLAIN_EPILOG
    command.add_argument("model", help=f"{MODEL}; or a config.json")
    command.add_argument("--prompt-length", type=int, default=4096, help="tokens of context (default: 4096)")
    command.add_argument("--batch-size", type=int, default=1, help="sequences (default: 1)")
    command.add_argument("--device", help="A6000, A100, H100, H200, RTX 4090 or L4 (default: A100)")
    command.add_argument("--host-gib", type=gib, default=128.0, help="GiB of host memory (default: 128)")
    shown = command.add_mutually_exclusive_group()
    shown.add_argument("--nodes", action="store_true", help="print each launch of the decode step with its time")
    shown.add_argument("--graph", metavar="PHASE", help="print the rewritten graph: prefill, pre-decode or decode")
    shown.add_argument("--diff", nargs=2, metavar=("PHASE", "PASS"), help="print what a pass changed in a graph")
    command.add_argument(
        "--layer", type=int, metavar="N", help="print layer N before and after; with --graph or --diff: only layer N"
    )
    command.add_argument("--after", metavar="PASS", help="with --graph: print the graph after this pass")


def run_explain(args: argparse.Namespace, options: dict[str, Any]) -> None:
    from .explaining.explain import explain
    from .explaining.explanation import nodes_table
    from .explaining.graph_text import readable_graph

    if args.after and not args.graph:
        raise SpecacheError("--after goes with --graph PHASE")
    print_origin(args.model)
    explained = explain(
        args.model, args.prompt_length, args.batch_size, options,
        device=args.device, host_gib=args.host_gib,
    )  # fmt: skip
    if args.nodes:
        print(nodes_table(explained))
    elif args.diff:
        print(explained.diff(args.diff[0], args.diff[1], args.layer), end="")
    elif args.graph:
        print(readable_graph(explained.graph(args.graph, args.after, args.layer)), end="")
    elif args.layer is not None:
        print(explained.layer(args.layer), end="")
    else:
        print(explained)


def run(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Run the command that the arguments name."""
    command = COMMANDS[args.command]
    if hasattr(args, "model"):
        checked(args.model)
    if hasattr(args, "device") and args.command != "explain":  # whose device is the name of a GPU
        args.device = usable_device(args.device)
    given: list[Any] = [args]
    if command.options:
        from .methods import parse_options

        given.append(options_of(args))
        parse_options(given[-1])
    if command.recorded:
        given.append(words)
    function(command.run)(*given)


def main(arguments: list[str] | None = None) -> int:
    """Entry point. A usage error, a bad path, option or phase prints one line on stderr and returns 2."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if words[:1] == ["--version"]:
            from . import __version__

            print(f"specache {__version__}")
        else:
            run(parsed(words), words)
        print(end="", flush=True)  # not sys.stdout.flush(), because a closed standard output is None
    except BrokenPipeError:  # the reader of standard output has left, for example `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as a shell reports SIGPIPE
    except (SpecacheError, OptionError, OSError, ValueError) as error:
        print(f"specache: {first_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
