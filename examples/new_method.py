"""Add a method to the registry: an eviction policy that keeps the pairs with the least certain attention.

python examples/new_method.py [MODEL]        docs/methods.md and CONTRIBUTING.md describe larger methods
"""

from __future__ import annotations

import math
import sys

import torch

import specache_compile as sc
from specache_compile.evaluation.baselines.eviction import eviction
from specache_compile.evaluation.baselines.policies import POLICIES, History, newest
from specache_compile.methods import METHODS


def importance(history: History, budget: int, random: torch.Generator) -> torch.Tensor:
    """Mean attention plus its standard deviation, [B, H, n]; the newest half of the budget is protected."""
    return (history.mean + history.deviation).masked_fill(newest(history, budget // 2), math.inf)


def main(name: str = "smollm2-135m") -> None:
    POLICIES["upper_bound"] = importance
    METHODS["upper_bound"] = eviction("upper_bound")
    model, tokenizer = sc.load_model(name)
    model.compile(backend="specache", options={"method": "upper_bound", "budget": 64})
    inputs = tokenizer("One, two, three, four, " * 20, return_tensors="pt").to(model.device)
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))
    print(f"kept {sc.stats(model).kv_ratio:.3f} of the full cache's bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
