"""The training loop of the needle model: stages of growing length, saved every 100 steps, resumable.

A seed determines a run: the generator of batch n is seeded by (seed, n). A resumed run therefore draws the same
batches.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

PEAK_LEARNING_RATE = 2e-3
WARMUP_STEPS = 100
SAVE_EVERY, CHECK_EVERY = 100, 200

Batch = Callable[[int, random.Random], tuple[torch.Tensor, torch.Tensor]]
"""(length, generator) -> token ids and loss weights, both [rows, length]."""
Check = Callable[[LlamaForCausalLM, int], str]
"""(model, length) -> a line that says how good it is."""


@dataclass(frozen=True)
class TrainingStage:
    """`steps` optimiser steps on sequences of `length` tokens."""

    length: int
    steps: int


def scaled(stages: tuple[TrainingStage, ...], scale: float) -> tuple[TrainingStage, ...]:
    """The same stages with more or fewer steps (0.01 for a dry run)."""
    return tuple(TrainingStage(stage.length, max(1, round(stage.steps * scale))) for stage in stages)


def byte_llama(**changes: int) -> LlamaForCausalLM:
    """A Llama whose token ids are byte values: 4 layers, width 128, 4 query and 2 KV heads of 32 channels."""
    settings = {
        "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2304,
    }  # fmt: skip
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
            **{**settings, **changes},
        )
    )  # fmt: skip


def learning_rate(step: int, total: int) -> float:
    """Linear warm-up, then cosine down to a twentieth of the peak."""
    if step < WARMUP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, total - WARMUP_STEPS)
    return PEAK_LEARNING_RATE * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def optimizer_of(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    """AdamW; matrices decay, norms do not."""
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))


def weighted_loss(model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each next token times its weight, summed over a row, averaged over rows."""
    logits = model(ids).logits
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (losses * weights[:, 1:].flatten()).sum() / ids.shape[0]


def train(
    model: LlamaForCausalLM, work: Path, stages: tuple[TrainingStage, ...], seed: int, batch: Batch, check: Check
) -> LlamaForCausalLM:
    """Run every stage, from the last save in `work` on; returns the trained model."""
    work.mkdir(parents=True, exist_ok=True)
    optimizer, saved, step = optimizer_of(model), work / "training.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    total, end = sum(stage.steps for stage in stages), 0
    with tqdm(total=total, initial=step, desc="training", file=sys.stderr) as bar:
        try:
            for stage in stages:
                end += stage.steps
                while step < end:
                    loss = one_step(model, optimizer, batch(stage.length, random.Random(f"{seed}/{step}")), step, total)
                    step += 1
                    bar.update()
                    bar.set_postfix(length=stage.length, loss=f"{loss:.3f}")
                    if step % SAVE_EVERY == 0 or step == end:
                        save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, saved)
                    if step % CHECK_EVERY == 0 or step == end:
                        bar.write(f"step {step}: {check(model, stage.length)}", file=sys.stderr)
        except KeyboardInterrupt:
            bar.write(f"interrupted at step {step}: run it again, it goes on from the last save", file=sys.stderr)
            raise SystemExit(130) from None
    return model


def one_step(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    step: int,
    total: int,
) -> float:
    """One optimiser step; the loss before it."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, total)
    loss = weighted_loss(model, *batch)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def save(state: dict[str, object], path: Path) -> None:
    """Write beside and rename: an interruption leaves the old save or the new one, never half of one."""
    beside = path.with_suffix(".part")
    torch.save(state, beside)
    beside.replace(path)
