"""How sparse attention is: the share of its mass in each query's heaviest keys (SpeCache, Figure 2 left)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .inspected import Inspected
from .point import Point

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def points(run: Inspected) -> list[Point]:
    """The mean over query heads and the last `steps` queries: a curve for each layer, and one for their mean."""
    per_layer = [covered(layer, run.prefill) for layer in run.attention]  # [shares] each
    count = run.attention[0][:, :, run.prefill :, 0].numel()
    curves = {f"layer {number}": values for number, values in enumerate(per_layer)}
    curves["all layers"] = torch.stack(per_layer).mean(0)
    run.tick()
    return [
        Point(curve, 100 * share, value, count * (len(per_layer) if curve == "all layers" else 1))
        for curve, values in curves.items()
        for share, value in zip(SHARES, values.tolist(), strict=True)
    ]


def covered(attention: Tensor, first: int) -> Tensor:
    """Mean mass of the heaviest keys for each of SHARES; attention [windows, Hq, n, n], queries from `first`.

    Query t sees t + 1 keys; a share of them is rounded up to whole keys.
    """
    sums = torch.zeros(len(SHARES))
    queries = range(first, attention.shape[2])
    for query in queries:
        heaviest = attention[:, :, query, : query + 1].sort(-1, descending=True).values.cumsum(-1)
        for i, share in enumerate(SHARES):
            sums[i] += heaviest[..., keys_in(share, query + 1) - 1].mean()
    return sums / len(queries)


def keys_in(share: float, seen: int) -> int:
    return max(1, math.ceil(share * seen))
