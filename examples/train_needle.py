"""Train the small byte-level needle model; `python examples/train_needle.py --help`.

Sequences are pass-key prompts, repeated random bytes (they teach the model to copy) and source text. Lengths grow in
stages up to 2,048 tokens. A seed determines the run.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    get_cosine_with_min_lr_schedule_with_warmup,
)

from needle_samples import sample
from specache_compile.evaluation.tasks.haystack import library_source
from specache_compile.evaluation.tasks.needle import KEY_DIGITS

SHIPPED = Path(__file__).parent / "needle-llama"
TOKENS_PER_STEP = 8192
ANSWER_WEIGHT = 1.0  # the answer's mean loss, beside the mean loss of all other tokens
PEAK_LEARNING_RATE, WARMUP_STEPS = 2e-3, 100
CHECK_EVERY = 200


@dataclass(frozen=True)
class TrainingStage:
    """`steps` optimiser steps on sequences of `length` tokens."""

    length: int
    steps: int


STAGES = (
    TrainingStage(128, 1200),
    TrainingStage(256, 800),
    TrainingStage(512, 800),
    TrainingStage(1024, 500),
    TrainingStage(2048, 900),
)


def byte_llama() -> LlamaForCausalLM:
    """A Llama whose token ids are byte values: 4 layers, width 128, 4 query and 2 KV heads of 32 channels."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
            hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=32, max_position_embeddings=2304,
        )
    )  # fmt: skip


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


def optimizer_of(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    """AdamW; matrices decay, norms do not."""
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98))


def weighted_loss(model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each next token times its weight, summed over a row, averaged over rows."""
    logits = model(ids).logits
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (losses * weights[:, 1:].flatten()).sum() / ids.shape[0]


def train(model: LlamaForCausalLM, source: bytes, held_out: bytes, seed: int) -> None:
    """Run every stage: linear warm-up, then cosine down to a twentieth of the peak learning rate."""
    lengths = [stage.length for stage in STAGES for _ in range(stage.steps)]
    optimizer = optimizer_of(model)
    schedule = get_cosine_with_min_lr_schedule_with_warmup(optimizer, WARMUP_STEPS, len(lengths), min_lr_rate=0.05)
    with tqdm(lengths, desc="training", file=sys.stderr) as bar:
        for step, length in enumerate(bar):
            loss = weighted_loss(model, *batch(source, length, random.Random(f"{seed}/{step}")))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            bar.set_postfix(length=length, loss=f"{loss.item():.3f}")
            if (step + 1) % CHECK_EVERY == 0:
                right = accuracy(model, held_out, length, 32)
                bar.write(f"step {step + 1}: {right:.0%} of pass keys at {length} tokens", file=sys.stderr)


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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=100, help="questions at each length after the training")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    held_out, start, model = library_source(held_out=True), time.time(), byte_llama()
    train(model, library_source(held_out=False), held_out, args.seed)
    model.eval()
    report = {str(length): accuracy(model, held_out, length, args.samples) for length in (256, 512, 1024, 2048)}
    model.save_pretrained(args.out)
    AutoTokenizer.from_pretrained(SHIPPED).save_pretrained(args.out)  # a token's id is its byte
    (args.out / "training.json").write_text(
        json.dumps({"full_cache_accuracy": report, "seed": args.seed, "stages": [vars(s) for s in STAGES]}, indent=2)
        + "\n"
    )
    print(f"saved to {args.out} after {(time.time() - start) / 60:.0f} minutes; pass keys recalled: {report}")


if __name__ == "__main__":
    main()
