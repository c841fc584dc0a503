"""Persistence of attention robustness: a token's attention deviates most soon after the token (RoCo, Figure 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from .inspected import Inspected
from .point import Point


def points(run: Inspected) -> list[Point]:
    """A curve for each layer, and their mean: over tokens that `steps` later queries see, each relative to its largest
    value."""
    means = []
    for layer in run.grouped_attention:
        curves = running_deviation(layer, run.steps)  # [windows, H, tokens, steps]
        curves = curves / curves.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        means.append(curves.mean((0, 1, 2)))
    run.tick()
    count = curves[..., 0].numel()
    found = [(f"layer {number}", mean, count) for number, mean in enumerate(means)]
    found.append(("all layers", torch.stack(means).mean(0), count * len(means)))
    return [
        Point(curve, lag, value, count)
        for curve, mean, count in found
        for lag, value in enumerate(mean.tolist(), start=1)
    ]


def running_deviation(attention: Tensor, steps: int) -> Tensor:
    """Deviation of the attention that token j got from queries j .. j + s, s = 1 .. steps: [windows, H, tokens, steps].

    attention [windows, H, n, n]. The tokens are those with `steps` later queries, without the first, which is a sink.
    """
    tokens = torch.arange(1, attention.shape[2] - steps)
    queries = tokens[:, None] + torch.arange(steps + 1)
    received = attention[:, :, queries, tokens[:, None]].double()
    count = torch.arange(1, steps + 2)
    mean = received.cumsum(-1) / count
    variance = received.square().cumsum(-1) / count - mean.square()
    return variance.clamp(min=0).sqrt()[..., 1:].float()
