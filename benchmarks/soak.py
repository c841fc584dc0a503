"""A soak test: random operations on a compiled model and its caches, compared with the uncompiled model.

    python benchmarks/soak.py --minutes 10    (--seed 7 --calls 200, --min-context 96, --device cuda --small)

A seed determines all operations: generation, steps, edits, forks, interrupts, failing copies. The first difference ends
the run with exit status 1 and prints the command that reproduces it.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import sys
import time
import traceback
import warnings
from contextlib import nullcontext

import torch
import transformers
from soak_operations import OPERATIONS
from soak_state import SMALL, VOCABULARY, Difference, Sizes, Soak, some_text
from tabulate import tabulate
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

# Every pair is fetched, so that the 1-bit tier never decides. The small group and window make tokens leave the window
# early.
LOSSLESS = {"bits": 1, "group_size": 32, "residual_length": 32, "top_k": 1024, "host_bits": 16}


def tiny(seed: int, layers: int) -> LlamaForCausalLM:
    """Weights large enough that logits are well apart."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, initializer_range=0.3, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def compiled(model: LlamaForCausalLM, args: argparse.Namespace) -> LlamaForCausalLM:
    twin = copy.deepcopy(model)
    options = {**LOSSLESS, "lowering": args.lowering, "min_context": args.min_context}
    twin.compile(backend="specache", options=options)
    return twin


def operate(soak: Soak, seed: int, number: int) -> None:
    """Operation `number` of `seed`."""
    draw = random.Random(f"{seed}, {number}")
    name, _, function = draw.choices(OPERATIONS, [weight for _, weight, _ in OPERATIONS])[0]
    soak.now = f"operation {number} ({name})"
    started = time.perf_counter()
    soak.calls[name] += 1
    soak.tokens[name] += function(soak, draw)
    soak.seconds[name] += time.perf_counter() - started


def last_look(soak: Soak) -> None:
    """Every cache of the pool takes one more step; only their sessions are alive."""
    soak.now = "the last look at the pool"
    for pair in soak.pool:
        soak.tokens["new cache"] += soak.step(pair, some_text(random.Random(0), len(pair.text), 1))
    soak.check_dropped()
    alive, ours = soak.alive(), sum(pair.session is not None for pair in soak.pool)
    if alive != ours:
        raise Difference(f"{alive} sessions are alive, and the pool has {ours}")


@torch.no_grad()
def run(soak: Soak, args: argparse.Namespace, bar: tqdm) -> None:
    """Operations until the calls or the minutes are used up, and the last look."""
    began = time.perf_counter()
    for number in itertools.count(1):
        elapsed = time.perf_counter() - began
        share = (number - 1) / args.calls if args.calls else elapsed / (60 * args.minutes)
        bar.n = round(share * bar.total)
        bar.set_postfix_str(f"{number - 1} operations")
        if share >= 1:
            break
        operate(soak, args.seed, number)
    last_look(soak)


def figures(soak: Soak, seconds: float) -> dict[str, int]:
    """Further figures of a soak test: faults and lifetimes."""
    lifetimes = {"sessions alive at the end": soak.alive(), "caches in the pool": len(soak.pool)}
    return {**soak.facts, **lifetimes, "seconds": round(seconds)}


def table(soak: Soak, facts: dict[str, int]) -> str:
    names = [name for name, _, _ in OPERATIONS if soak.calls[name]]
    rows = [(name, soak.calls[name], soak.tokens[name], round(soak.seconds[name], 1)) for name in names]
    rows.append(("all", *(round(sum(column), 1) for column in list(zip(*rows, strict=True))[1:])))
    return "\n\n".join([tabulate(rows, ("operation", "calls", "tokens compared", "seconds")), tabulate(facts.items())])


def command(args: argparse.Namespace, calls: int) -> str:
    """What shows the first `calls` operations again."""
    more = {"--min-context": args.min_context, "--recompile-limit": args.recompile_limit}
    given = "".join(f" {name} {value}" for name, value in more.items() if value)
    given += f" --device {args.device}" * (args.device != "cpu") + " --small" * args.small
    return f"python benchmarks/soak.py --seed {args.seed} --calls {calls} --lowering {args.lowering}{given}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="how long it takes (default: 10)")
    parser.add_argument("--calls", type=int, help="stop after so many operations instead, however long they take")
    parser.add_argument("--seed", type=int, default=0, help="what the operations are drawn from (default: 0)")
    parser.add_argument("--lowering", choices=("eager", "inductor"), default="eager", help="(default: eager)")
    parser.add_argument("--device", default="cpu", help="torch's name of it (default: cpu)")
    parser.add_argument("--small", action="store_true", help="few rows and short texts, for a simulated device")
    parser.add_argument("--min-context", type=int, default=0, metavar="N", help="tokens below which caches are 16-bit")
    parser.add_argument("--recompile-limit", type=int, metavar="N", help="Dynamo's, on graphs of one function")
    args = parser.parse_args(arguments)
    if args.minutes <= 0:
        parser.error("--minutes: more than 0")
    transformers.logging.set_verbosity_error()
    limits = {"recompile_limit": args.recompile_limit, "accumulated_recompile_limit": 100 * (args.recompile_limit or 0)}
    model, assistant = tiny(0, layers=2).to(args.device), tiny(5, layers=1).to(args.device)
    soak = Soak(model, compiled(model, args), compiled(assistant, args), SMALL if args.small else Sizes())
    failed, started = "", time.perf_counter()
    with (
        nullcontext() if args.device == "cpu" else torch.device(args.device),
        torch._dynamo.config.patch(limits if args.recompile_limit else {}),
        warnings.catch_warnings(action="ignore"),
        tqdm(total=args.calls or round(60 * args.minutes), file=sys.stderr, unit="" if args.calls else "s") as bar,
    ):
        try:
            run(soak, args, bar)
        except KeyboardInterrupt:
            print(f"interrupted in {soak.now}: the table so far", file=sys.stderr)
        except Difference as difference:
            failed = f"{soak.now}: {difference}"
        except Exception:  # whatever it is, the command that shows it again goes with it
            failed = f"{soak.now}: {traceback.format_exc()}"
    facts = figures(soak, time.perf_counter() - started)
    print(table(soak, facts))
    if failed:
        print(f"\n{failed}\nshown again by: {command(args, soak.calls.total())}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
