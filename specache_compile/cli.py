"""The `specache` command: a demo, generate, bench, explain, serve, compile, cache, eval."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .bench.command import add_bench, run_bench
from .checkpoints.loaded import limit_of, placed, tokenizer_of
from .checkpoints.names import resolved, tell_origin
from .demo.command import add_demo, run_demo
from .errors import OptionError, SpecacheError, first_line
from .evaluation.command import MODEL, add_eval, run_eval
from .evaluation.reader import chat_turn
from .explaining.times.devices import find_device
from .explaining.times.verification import ACCEPTED
from .methods import declared_options, defaults_of, every_method, parse_options
from .serving.command import add_serve, run_serve
from .warm.command import add_cache, add_compile, run_cache, run_compile

DESCRIPTION = "SpeCache as a torch.compile backend: 16-bit KV cache on the host, 1 or 2 bits on the device."


EXPLAIN_EPILOG = """\
examples:
  specache explain smollm2-135m --prompt-length 8192
  specache explain meta-llama/Llama-3.1-8B --device H100 --bits 1 --save report.html

It takes the backend's options too: `specache generate --help` lists them. docs/explain.md has more: a device of your
own (--hbm-gbps, --pcie-gbps, --tflops, --vram-gib), and what is assumed (--reuse, --corrected, --accepted).
"""


def parser() -> argparse.ArgumentParser:
    """The command line, its commands in the order in which a person needs them."""
    top = argparse.ArgumentParser(prog="specache", description=DESCRIPTION)
    commands = top.add_subparsers(dest="command", required=True)
    add_demo(commands.add_parser("demo", help="keys found, bytes and times of one real model; four minutes"))
    add_generate(commands.add_parser("generate", help="continue a prompt with a compiled checkpoint"))
    add_bench(commands.add_parser("bench", help="a decode step, first tokens and bytes, beside other caches"))
    add_explain(
        commands.add_parser(
            "explain", help="what is rewritten, and where every byte lives; needs no weights and no GPU"
        )
    )
    add_compiling(commands.add_parser("serve", help="a compiled checkpoint behind OpenAI's interface"), add_serve)
    add_eval(commands.add_parser("eval", help="tasks × methods: a table, CSV, JSON and pictures; goes on where it was"))
    add_compiling(
        commands.add_parser("compile", help="trace a checkpoint now, so that later processes need not"), add_compile
    )
    add_cache(commands.add_parser("cache", help="what compiled models have left for later processes: list, clear"))
    return top


def add_compiling(command: argparse.ArgumentParser, own: Callable[[argparse.ArgumentParser], None]) -> None:
    """The arguments of a command that compiles a checkpoint, with the command's own behind the first."""
    command.add_argument("model", metavar="CHECKPOINT", help=MODEL)
    own(command)
    add_device(command)
    add_options(command)


def add_generate(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", help=MODEL)
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="the prompt itself")
    source.add_argument("--prompt-file", type=Path, help="a text file with the prompt")
    command.add_argument("--chat", action="store_true", help="put the chat template around the prompt")
    command.add_argument("--max-new-tokens", type=int, default=100, help="tokens to add (default: 100)")
    command.add_argument("--stats", action="store_true", help="afterwards print steps, bytes moved, time waited")
    add_device(command)
    add_options(command)


def add_device(command: argparse.ArgumentParser) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    command.add_argument("--device", default=device, help="default: %(default)s")


def add_explain(command: argparse.ArgumentParser) -> None:
    """Its help shows what most people ask for, and says where the rest stands."""
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.epilog = EXPLAIN_EPILOG
    command.add_argument("model", help=f"{MODEL}; or a config.json")
    command.add_argument("--prompt-length", type=int, default=4096, help="tokens of context (default: 4096)")
    command.add_argument("--batch-size", type=int, default=1, help="rows (default: 1)")
    command.add_argument("--device", help="for the roofline: A6000, A100, H100, H200, RTX 4090 or L4 (default: A100)")
    command.add_argument("--host-gib", type=float, default=128.0, help="GiB of host memory (default: 128)")
    command.add_argument(
        "--ranks", type=int, default=1, help="explain one of so many ranks that share the model (default: 1)"
    )
    for name in ("--hbm-gbps", "--pcie-gbps", "--tflops", "--vram-gib"):
        command.add_argument(name, type=float, help=argparse.SUPPRESS)
    for name, assumed in (("--reuse", 0.0), ("--corrected", None), ("--accepted", ACCEPTED)):
        command.add_argument(name, type=float, default=assumed, help=argparse.SUPPRESS)
    shown = command.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="everything as JSON")
    shown.add_argument("--nodes", action="store_true", help="each launch of the decode step with its least time")
    shown.add_argument("--graph", metavar="PHASE", help="print the rewritten graph: prefill, pre-decode or decode")
    shown.add_argument(
        "--diff", nargs=2, metavar=("PHASE", "PASS"), help="what a pass changed in a phase's graph, as a unified diff"
    )
    command.add_argument("--after", metavar="PASS", help="with --graph: the graph as it stood after this pass")
    command.add_argument(
        "--save", action="append", default=[], type=Path, metavar="FILE",
        help="write report.html or timeline.json (Perfetto); may be repeated",
    )  # fmt: skip
    add_options(command, shown=False)


def add_options(command: argparse.ArgumentParser, shown: bool = True) -> None:
    """The backend's options, as the methods declare them; what is not given is left to the method's default. shown:
    by the command's help."""
    group = command.add_argument_group("backend options") if shown else command
    group.add_argument("--method", choices=every_method(), help="default: specache" if shown else argparse.SUPPRESS)
    for name, declarations in declared_options().items():
        declared = next(iter(declarations.values()))
        flag = dict(declared.metadata["flag"])
        if not flag.pop("flag", True):
            continue
        told = f"{declared.metadata['help']} ({defaults(declarations)})".replace("%", "%%")
        told = told if shown else argparse.SUPPRESS
        words = "--" + name.replace("_", "-")
        if isinstance(declared.default, bool):
            group.add_argument(words, action=argparse.BooleanOptionalAction, default=None, help=told)
        else:
            group.add_argument(words, default=None, help=told, **flag)
    group.add_argument(
        "--one-lane",
        dest="speculate",
        action="store_false",
        default=None,
        help="--no-speculate" if shown else argparse.SUPPRESS,
    )


def defaults(declarations: Mapping[str, Any]) -> str:
    """Who takes an option, and its default: "default: 64; kivi: 128"."""
    usual, others = defaults_of(declarations)
    takers = "" if len(declarations) == len(every_method()) else f"{', '.join(declarations)}; "
    return takers + "; ".join([f"default: {usual}", *(f"{method}: {value}" for method, value in others.items())])


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given."""
    names = ["method", *declared_options()]
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def run_explain(args: argparse.Namespace) -> None:
    from .explaining.explain import explain
    from .explaining.tables import nodes_table

    if args.after and not args.graph:
        raise SpecacheError("--after goes with --graph PHASE")
    tell_origin(args.model)
    figures = (args.hbm_gbps, args.pcie_gbps, args.tflops, args.vram_gib)
    explained = explain(
        args.model, args.prompt_length, args.batch_size, options_of(args),
        device=find_device(args.device, *figures), host_gib=args.host_gib, reuse=args.reuse, corrected=args.corrected,
        accepted=args.accepted, ranks=args.ranks,
    )  # fmt: skip
    for path in args.save:
        explained.save(path)
    if args.json:
        print(json.dumps(explained.to_dict(), indent=1))
    elif args.nodes:
        print(nodes_table(explained))
    elif args.diff:
        print(explained.diff(*args.diff), end="")
    elif args.graph:
        graph = explained.graph(args.graph, args.after)
        print(graph if isinstance(graph, str) else graph.print_readable(print_output=False))
    elif not args.save:
        print(explained)


def run_generate(args: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM, TextStreamer

    from .runtime.stats import stats

    text = args.prompt if args.prompt is not None else args.prompt_file.read_text()
    path = resolved(args.model)
    tell_origin(args.model)
    tokenizer = tokenizer_of(path)
    how = {"return_tensors": "pt"}
    inputs = chat_turn(tokenizer, text, return_dict=True, **how) if args.chat else tokenizer(text, **how)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    check_room(inputs["input_ids"].shape[1], args.max_new_tokens, limit_of(model))
    model = placed(model, args.device)
    model.compile(backend="specache", options=options_of(args))
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generate(**inputs.to(args.device), max_new_tokens=args.max_new_tokens, do_sample=False, streamer=streamer)
    if args.stats:
        print(stats(model), file=sys.stderr)


def check_room(prompt: int, added: int, limit: int) -> None:
    if prompt + added > limit:
        raise SpecacheError(
            f"the prompt has {prompt:,} tokens, and --max-new-tokens {added:,} would follow: the model's context is "
            f"{limit:,}"
        )


# Their results tell the command that made them.
RECORDED = {"demo": run_demo, "bench": run_bench, "eval": run_eval}
RUN = {
    "explain": run_explain,
    "generate": run_generate,
    "serve": lambda args: run_serve(args, options_of(args)),
    "compile": lambda args: run_compile(args, options_of(args)),
    "cache": run_cache,
}


def main(arguments: list[str] | None = None) -> int:
    """Entry point; a bad path, option or phase is one line on stderr and exit status 2."""
    args = parser().parse_args(arguments)
    try:
        if args.command in RECORDED:
            RECORDED[args.command](args, sys.argv[1:] if arguments is None else arguments)
        else:
            parse_options(options_of(args))
            RUN[args.command](args)
    except (SpecacheError, OptionError, OSError, ValueError) as error:
        print(f"specache: {first_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
