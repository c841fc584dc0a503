"""Selection by the query against greedy eviction: the attention mass that k pairs hold (SpeCache, Figure 2 left).

The mass is the full cache's. A policy's kept pairs come from a run under the policy over the same tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .inspected import Inspected
from .point import Point

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
POLICIES = ("h2o", "scissorhands", "tova", "roco", "streaming_llm", "random")


def points(run: Inspected) -> list[Point]:
    """The mean over windows, layers, query heads and steps. A step's own token is one of its pairs."""
    count = run.attention[0][:, :, run.prefill :, 0].numel() * len(run.attention)
    found = []
    for share in SHARES:
        pairs = max(1, round(share * run.length))
        found.append(Point("each query's own top k", 100 * share, own_top_k(run, pairs), count))
        for policy in POLICIES:
            found.append(Point(policy, 100 * share, kept_mass(run, policy, pairs), count))
    return found


def own_top_k(run: Inspected, pairs: int) -> float:
    """The mass of the `pairs` heaviest keys of each query and head."""
    queries = [layer[:, :, run.prefill :] for layer in run.attention]
    return float(torch.stack([layer.topk(min(pairs, run.length)).values.sum(-1).mean() for layer in queries]).mean())


def kept_mass(run: Inspected, policy: str, pairs: int) -> float:
    """The full cache's attention to `pairs` pairs: those that the policy keeps, one less, and the step's own."""
    sums = [
        mass_of(session.state[number]["kept_token"].cpu(), layer[:, :, token, : token + 1])
        for token, session in run.forced(policy, max(1, pairs - 1))
        for number, layer in enumerate(run.grouped_attention)
    ]
    return float(torch.stack(sums).mean())


def mass_of(kept: Tensor, attention: Tensor) -> Tensor:
    """Mean mass [] of the kept tokens [windows, H, b] and the newest; attention [windows, H, n]."""
    held = attention.gather(-1, kept.long().clamp(0)).masked_fill(kept < 0, 0.0).sum(-1)
    return (held + attention[..., -1]).mean()
