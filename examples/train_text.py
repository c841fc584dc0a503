"""Train the small byte-level Llama on which perplexity is measured; `python examples/train_text.py --help`.

Its text is Python source: the standard library (without the tenth of its files that is held out) and the installed
packages that `constraints.txt` pins. Interrupt it and run it again: it goes on from the last save.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import random
import time
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from specache_compile.evaluation.tasks.haystack import library_source
from training import Stage, byte_llama, scaled, train, weighted_loss

PACKAGES = ("networkx", "jinja2", "huggingface_hub", "tqdm", "tabulate", "fsspec", "pydantic")
STAGES = (Stage(256, 1300), Stage(512, 600), Stage(1024, 400), Stage(2048, 200))
TOKENS_PER_STEP = 4096


def package_source(name: str) -> bytes:
    """The Python source of an installed package, its tests left out."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    files = sorted(path for path in root.rglob("*.py") if "tests" not in path.relative_to(root).parts)
    if root.name != name:  # a package of one file
        files = [Path(spec.origin)]
    return b"\n".join(path.read_bytes() for path in files)


def training_text() -> bytes:
    return b"\n".join((library_source(held_out=False), *(package_source(name) for name in PACKAGES)))


def windows(text: bytes, length: int, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of the text, token ids and equal weights [rows, length]."""
    starts = [rng.randrange(len(text) - length) for _ in range(TOKENS_PER_STEP // length)]
    ids = torch.stack([torch.frombuffer(bytearray(text[s : s + length]), dtype=torch.uint8).long() for s in starts])
    return ids, torch.full(ids.shape, 1.0 / (length - 1))


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, text: bytes, length: int, rows: int = 32) -> float:
    """Mean over `rows` windows of held-out text, evenly spread; each window's first byte is given."""
    starts = [i * (len(text) - length) // max(1, rows - 1) for i in range(rows)]
    losses = []
    for start in starts:
        ids = torch.tensor([list(text[start : start + length])])
        losses.append(weighted_loss(model, ids, torch.full(ids.shape, 1.0 / (length - 1))).item())
    return sum(losses) / rows / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "text-llama", help="checkpoint folder")
    parser.add_argument("--work", type=Path, default=Path("build/text-llama"), help="folder of the resumable state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="multiply every stage's steps (0.01 for a dry run)")
    parser.add_argument("--rows", type=int, default=100, help="held-out windows at each length afterwards")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    text, held_out = training_text(), library_source(held_out=True)
    stages, start = scaled(STAGES, args.scale), time.time()
    model = train(
        byte_llama(hidden_size=192, intermediate_size=512, num_attention_heads=6),
        args.work,
        stages,
        args.seed,
        lambda length, rng: windows(text, length, rng),
        lambda model, length: f"{bits_per_byte(model, held_out, length, 8):.3f} bits per byte at {length} tokens",
    ).eval()
    report = {str(length): round(bits_per_byte(model, held_out, length, args.rows), 4) for length in (512, 1024, 2048)}
    model.save_pretrained(args.out)
    facts = {"held_out_bits_per_byte": report, "training_bytes": len(text), "tokens_per_step": TOKENS_PER_STEP,
             "seed": args.seed, "stages": [vars(stage) for stage in stages]}  # fmt: skip
    (args.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(f"saved to {args.out} after {(time.time() - start) / 60:.0f} minutes; held-out bits per byte: {report}")


if __name__ == "__main__":
    main()
