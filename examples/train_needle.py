"""Train the small byte-level needle model; `python examples/train_needle.py --help`.

Sequences are pass-key prompts, repeated random bytes (they teach the model to copy) and source text. Lengths grow in
stages up to 2,048 tokens. An interrupted run resumes from the last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from needle_samples import sample
from specache_compile.evaluation.tasks.haystack import library_source
from specache_compile.evaluation.tasks.needle import KEY_DIGITS
from training import TrainingStage, byte_llama, scaled, train

SHIPPED = Path(__file__).parent / "needle-llama"
STAGES = (
    TrainingStage(128, 1200),
    TrainingStage(256, 800),
    TrainingStage(512, 800),
    TrainingStage(1024, 500),
    TrainingStage(2048, 900),
)
TOKENS_PER_STEP = 8192
ANSWER_WEIGHT = 1.0  # the answer's mean loss, beside the mean loss of all other tokens


def batch(source: bytes, length: int, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and loss weights, both [rows, length]; a row's answer weighs as much as all its other tokens."""
    rows, weights = [], []
    for _ in range(TOKENS_PER_STEP // length):
        kind = rng.random()
        weight = torch.full((length,), 1.0 / length)
        if kind < 0.30:
            period = rng.randrange(8, length // 2)
            noise = rng.randbytes(period)
            row = (noise * (length // period + 1))[:length]
            weight[:period] = 0.0
        elif kind < 0.90:
            # One in four needles stands nearer the question than uniform: short distances are learned first.
            depth = rng.random() if rng.random() < 0.75 else 1 - 0.2 * rng.random()
            one = sample(source, length - KEY_DIGITS, depth, rng)
            row = one.prompt + one.answer
            weight[-KEY_DIGITS:] = ANSWER_WEIGHT / KEY_DIGITS
        else:
            start = rng.randrange(len(source) - length)
            row = source[start : start + length]
        rows.append(torch.frombuffer(bytearray(row), dtype=torch.uint8).long())
        weights.append(weight)
    return torch.stack(rows), torch.stack(weights)


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, source: bytes, length: int, samples: int, seed: int = 1) -> float:
    """Share of pass keys that the full cache recalls, all five digits, needles at evenly spread depths."""
    rng = random.Random(seed)
    right = 0
    for i in range(samples):
        one = sample(source, length - KEY_DIGITS, i / max(1, samples - 1), rng)
        ids = torch.tensor([list(one.prompt + one.answer)])
        guess = model(ids).logits[0, -KEY_DIGITS - 1 : -1].argmax(-1)
        right += bytes(guess.tolist()) == one.answer
    return right / samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=SHIPPED, help="checkpoint folder")
    parser.add_argument("--work", type=Path, default=Path("build/needle-llama"), help="folder of the resumable state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="multiply every stage's steps (0.01 for a dry run)")
    parser.add_argument("--samples", type=int, default=100, help="questions at each length after the training")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    source, held_out = library_source(held_out=False), library_source(held_out=True)
    stages, start = scaled(STAGES, args.scale), time.time()
    model = train(
        byte_llama(),
        args.work,
        stages,
        args.seed,
        lambda length, rng: batch(source, length, rng),
        lambda model, length: f"{accuracy(model, held_out, length, 32):.0%} of pass keys at {length} tokens",
    ).eval()
    report = {str(length): accuracy(model, held_out, length, args.samples) for length in (256, 512, 1024, 2048)}
    model.save_pretrained(args.out)
    AutoTokenizer.from_pretrained(SHIPPED).save_pretrained(args.out)  # a token's id is its byte
    (args.out / "training.json").write_text(
        json.dumps({"full_cache_accuracy": report, "seed": args.seed, "stages": [vars(s) for s in stages]}, indent=2)
        + "\n"
    )
    print(f"saved to {args.out} after {(time.time() - start) / 60:.0f} minutes; pass keys recalled: {report}")


if __name__ == "__main__":
    main()
