"""Train the small byte-level Llama that the demo asks for needles; `python examples/train_needle.py --help`.

Sequences are a mixture of pass-key prompts, repeated random bytes (they teach the model to copy) and plain
source text. Lengths grow in stages up to 2,048 tokens. Interrupt it and run it again: it goes on from the last save.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from needle import KEY_DIGITS, library_source, sample


@dataclass(frozen=True)
class Stage:
    """`steps` optimiser steps on sequences of `length` tokens."""

    length: int
    steps: int


STAGES = (Stage(128, 1200), Stage(256, 800), Stage(512, 800), Stage(1024, 500), Stage(2048, 900))
TOKENS_PER_STEP = 8192
PEAK_LEARNING_RATE = 2e-3
WARMUP_STEPS = 100
ANSWER_WEIGHT = 1.0  # the answer's mean loss, beside the mean loss of all other tokens


def build_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=2304,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
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


def learning_rate(step: int, total: int) -> float:
    """Linear warm-up, then cosine down to a twentieth of the peak."""
    if step < WARMUP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, total - WARMUP_STEPS)
    return PEAK_LEARNING_RATE * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


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


def train(out: Path, stages: tuple[Stage, ...], seed: int) -> LlamaForCausalLM:
    """Run every stage, saving after each 100 steps so that nothing is lost; returns the trained model."""
    torch.manual_seed(seed)
    source, held_out = library_source(held_out=False), library_source(held_out=True)
    model = build_model()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}], betas=(0.9, 0.98)
    )
    saved = out / "training.pt"
    step = 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    total = sum(stage.steps for stage in stages)
    bar = tqdm(total=total, initial=step, desc="training", file=sys.stderr)
    end = 0
    for stage in stages:
        end += stage.steps
        while step < end:
            ids, weights = batch(source, stage.length, random.Random(f"{seed}/{step}"))
            logits = model(ids).logits
            losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            loss = (losses * weights[:, 1:].flatten()).sum() / ids.shape[0]
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, total)
            optimizer.step()
            step += 1
            bar.update()
            bar.set_postfix(length=stage.length, loss=f"{loss.item():.3f}")
            if step % 100 == 0 or step == end:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, saved)
            if step % 200 == 0 or step == end:
                share = accuracy(model, held_out, stage.length, 32)
                bar.write(f"step {step}: {share:.0%} of pass keys at {stage.length} tokens")
    bar.close()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "needle-llama", help="checkpoint folder")
    parser.add_argument("--work", type=Path, default=Path("build/needle-llama"), help="folder of the resumable state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="multiply every stage's steps (0.01 for a dry run)")
    parser.add_argument("--samples", type=int, default=100, help="pass keys asked at each length afterwards")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    stages = tuple(Stage(s.length, max(1, round(s.steps * args.scale))) for s in STAGES)
    start = time.time()
    model = train(args.work, stages, args.seed).eval()
    held_out = library_source(held_out=True)
    report = {str(length): accuracy(model, held_out, length, args.samples) for length in (256, 512, 1024, 2048)}
    model.save_pretrained(args.out)
    (args.out / "training.json").write_text(
        json.dumps({"full_cache_accuracy": report, "seed": args.seed, "stages": [vars(s) for s in stages]}, indent=2)
        + "\n"
    )
    print(f"saved to {args.out} after {(time.time() - start) / 60:.0f} minutes; pass keys recalled: {report}")


if __name__ == "__main__":
    main()
