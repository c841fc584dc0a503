"""Teach the needle model to tell named pass keys apart; `python examples/train_keys.py --help`.

It goes on from the shipped needle model. A row hides two to six named keys in source text and asks for all of them in
turn; some rows are the needle model's own, so that it forgets nothing. The multi-key and shared-context tasks of
`specache eval` are asked of the result. Interrupt it and run it again: it goes on from the last save.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from specache_compile.evaluation.tasks.haystack import hide, library_source, window
from specache_compile.evaluation.tasks.multikey import NEEDLE, QUESTION
from specache_compile.evaluation.tasks.needle import KEY_DIGITS, ask, random_key
from training import Stage, scaled, train

HERE = Path(__file__).parent
STAGES = (Stage(256, 900), Stage(512, 400), Stage(1024, 150), Stage(2048, 80))
TOKENS_PER_STEP = 4096


def random_name(rng: random.Random) -> str:
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(5))


def multikey_row(source: bytes, length: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """Token ids, and the positions of the answers' digits: every key that is hidden is asked for, in a random order."""
    count = rng.randrange(2, min(6, length // 110) + 1)  # a needle and its exchange take 110 tokens
    keys = {random_name(rng): random_key(rng) for _ in range(count)}
    needles = [(rng.random(), NEEDLE.format(name=name, key=key).encode()) for name, key in keys.items()]
    asked = rng.sample(sorted(keys), count)
    exchange: list[int] = []
    ends = []
    for name in asked:
        exchange += QUESTION.format(name=name).encode() + keys[name].encode()
        ends.append(len(exchange))
    row = hide(source, length, needles, exchange, rng)
    start = length - len(exchange)
    return row, [start + end - digit for end in ends for digit in range(1, KEY_DIGITS + 1)]


def batch(source: bytes, length: int, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and loss weights, both [rows, length]; a row's answers weigh as much as all its other tokens."""
    rows, weights = [], []
    for _ in range(TOKENS_PER_STEP // length):
        kind, weight = rng.random(), torch.full((length,), 1.0 / length)
        if kind < 0.75:
            row, answers = multikey_row(source, length, rng)
            weight[answers] = 1.0 / len(answers)
        elif kind < 0.92:
            one = ask(source, length - KEY_DIGITS, rng.random(), rng, str.encode)
            row = [*one.prompt, *one.references[0].encode()]
            weight[-KEY_DIGITS:] = 1.0 / KEY_DIGITS
        else:
            row = list(window(source, length, rng))
        rows.append(torch.tensor(row))
        weights.append(weight)
    return torch.stack(rows), torch.stack(weights)


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, source: bytes, length: int, samples: int) -> float:
    """Share of named keys that the full cache recalls, all five digits, given the digits before."""
    rng = random.Random(1)
    right = total = 0
    for _ in range(samples):
        row, answers = multikey_row(source, length, rng)
        ids = torch.tensor([row])
        hit = model(ids).logits[0, :-1].argmax(-1) == ids[0, 1:]
        keys = hit[torch.tensor(answers) - 1].view(-1, KEY_DIGITS).all(1)
        right, total = right + int(keys.sum()), total + len(keys)
    return right / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, default=HERE / "needle-llama", help="checkpoint to go on from")
    parser.add_argument("--out", type=Path, default=HERE / "keys-llama", help="checkpoint folder")
    parser.add_argument("--work", type=Path, default=Path("build/keys-llama"), help="folder of the resumable state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="multiply every stage's steps (0.01 for a dry run)")
    parser.add_argument("--samples", type=int, default=50, help="prompts at each length afterwards")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    source, held_out = library_source(held_out=False), library_source(held_out=True)
    stages, start = scaled(STAGES, args.scale), time.time()
    model = train(
        LlamaForCausalLM.from_pretrained(args.start, dtype=torch.float32),
        args.work,
        stages,
        args.seed,
        lambda length, rng: batch(source, length, rng),
        lambda model, length: f"{accuracy(model, held_out, length, 32):.0%} of named keys at {length} tokens",
    ).eval()
    report = {str(length): accuracy(model, held_out, length, args.samples) for length in (256, 512, 1024, 2048)}
    model.save_pretrained(args.out)
    facts = {"full_cache_accuracy": report, "seed": args.seed, "stages": [vars(stage) for stage in stages]}
    (args.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(f"saved to {args.out} after {(time.time() - start) / 60:.0f} minutes; named keys recalled: {report}")


if __name__ == "__main__":
    main()
