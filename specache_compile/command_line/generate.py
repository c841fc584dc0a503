"""`specache generate`: continue a prompt."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specache_compile.checkpoints.loaded import limit_of, load_model, open_checkpoint
from specache_compile.checkpoints.names import MODEL
from specache_compile.errors import SpecacheError

from .arguments import add_dtype, number, whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


EPILOG = """\
examples:
  specache generate smollm2-135m --chat --prompt "What is the capital of France?"
  specache generate smollm2-135m --prompt-file LICENSE --max-new-tokens 50 --bits 1 --stats
"""


def add_generate(command: argparse.ArgumentParser) -> None:
    """The arguments of `specache generate`, except the device and the backend's options."""
    command.epilog = EPILOG
    command.add_argument("model", metavar="MODEL", help=MODEL)
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="the prompt")
    source.add_argument("--prompt-file", metavar="FILE", help="a text file with the prompt; - for standard input")
    command.add_argument("--chat", action="store_true", help="apply the chat template to the prompt")
    command.add_argument(
        "--max-new-tokens", type=whole, default=100, metavar="N", help="most generated tokens (default: %(default)s)"
    )
    command.add_argument(
        "--temperature", type=number(lambda t: 0 <= t < float("inf"), "a number, 0 or more"), metavar="T",
        help="sample at this temperature; without a sampling option decoding is greedy",
    )  # fmt: skip
    command.add_argument(
        "--top-p", type=number(lambda p: 0 < p <= 1, "a number above 0, at most 1"), metavar="P",
        help="sample from the smallest set of tokens with this total probability",
    )  # fmt: skip
    command.add_argument(
        "--sample-top-k", type=whole, metavar="K", help="sample from the K likeliest tokens (--top-k counts KV pairs)"
    )
    command.add_argument("--sample-seed", type=int, metavar="N", help="random seed of sampling")
    add_dtype(command, "auto")
    command.add_argument("--stats", action="store_true", help="print steps and bytes moved at the end")


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling arguments of `model.generate`."""
    given = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.sample_top_k}
    given = {name: value for name, value in given.items() if value is not None}
    if not given or args.temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "top_k": 0, **given}  # 0: transformers' own default is 50


def prompt_of(args: argparse.Namespace) -> str:
    """The prompt's text. SpecacheError if it is empty or not UTF-8."""
    from_stdin, source = args.prompt_file == "-", f"--prompt-file {args.prompt_file}"
    if args.prompt is not None or from_stdin:
        source = "standard input" if from_stdin else "--prompt"
    try:
        if args.prompt is not None:
            text = args.prompt
        else:
            text = sys.stdin.read() if from_stdin else Path(args.prompt_file).read_text("utf-8")
        text.encode("utf-8")  # Python reads other bytes of arguments as surrogates
    except UnicodeError as error:
        raise SpecacheError(f"{source} is not UTF-8 text ({error}). Pass UTF-8 text") from error
    if not text:
        raise SpecacheError(f"{source}: the prompt is empty; give at least one word")
    return text


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool) -> Any:
    """The prompt's `input_ids` and `attention_mask` [1, n]."""
    from specache_compile.evaluation.reader import chat_turn

    how = {"return_tensors": "pt"}
    inputs: Any = chat_turn(tokenizer, text, return_dict=True, **how) if chat else tokenizer(text, **how)
    if not inputs["input_ids"].shape[1]:
        raise SpecacheError("the prompt has no tokens; give at least one word")
    return inputs


def run_generate(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Print the continuation while it is generated. Arguments are checked before the weights are loaded."""
    sampling, text = sampling_of(args), prompt_of(args)
    checkpoint = open_checkpoint(args.model)
    inputs = ids_of(checkpoint.tokenizer, text, args.chat)
    tokens, limit = inputs["input_ids"].shape[1], limit_of(checkpoint.config)
    if tokens + args.max_new_tokens > limit:
        raise SpecacheError(
            f"the prompt has {tokens:,} tokens and --max-new-tokens is {args.max_new_tokens:,}; the model's context is "
            f"{limit:,}: shorten one of them"
        )
    import torch
    from transformers import TextStreamer

    from specache_compile.runtime.stats import stats

    model: Any
    model, tokenizer = load_model(checkpoint, args.dtype, args.device)
    model.compile(backend="specache", options=options)
    if args.sample_seed is not None:
        torch.manual_seed(args.sample_seed)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generate(**inputs.to(model.device), max_new_tokens=args.max_new_tokens, streamer=streamer, **sampling)
    if args.stats:
        print(stats(model), file=sys.stderr)
