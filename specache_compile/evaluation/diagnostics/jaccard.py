"""A policy's kept set against the set that the policy would choose from all pairs (RoCo, Figure 2).

The paper leaves local windows out. Here both sets include the pairs that the policy protects.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specache_compile.evaluation.baselines.policies import POLICIES
from specache_compile.evaluation.baselines.policies.history import History

from .inspected import Inspected
from .point import Point

RATES = (0.1, 0.3, 0.5, 0.7, 0.9)
CHOSEN = ("scissorhands", "h2o", "tova", "roco")


def points(run: Inspected) -> list[Point]:
    """The mean over windows, layers, KV heads and steps. Budgets are shares of the whole context."""
    return [similarity(run, policy, rate) for policy in CHOSEN for rate in RATES]


def similarity(run: Inspected, policy: str, rate: float) -> Point:
    """The mean over the steps after the first eviction; 1 where nothing is evicted."""
    budget = max(1, round(rate * run.length))
    histories = full_histories(run)
    found = [
        jaccard(session.state[number]["kept_token"].cpu(), chosen(policy, history[token], budget))
        for token, session in run.forced(policy, budget)
        if token > budget
        for number, history in enumerate(histories)
    ]
    heads = histories[0][run.prefill].token.shape[:2].numel()
    return Point(policy, rate, float(torch.stack(found).mean()) if found else 1.0, len(found) * heads)


def full_histories(run: Inspected) -> list[dict[int, History]]:
    """`full_history` of each layer, made once for all policies and rates."""
    if "histories" not in run.results:
        run.results["histories"] = [full_history(layer, run.prefill) for layer in run.grouped_attention]
    return run.results["histories"]  # type: ignore[no-any-return]


def full_history(attention: Tensor, first: int) -> dict[int, History]:
    """A head's history of all pairs before each token from `first` on; attention [windows, H, n, n]."""
    tokens = attention.shape[2]
    seen = torch.ones(tokens, tokens).tril()
    average = attention.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)
    total, squares = attention.cumsum(2), attention.square().cumsum(2)
    above, count = ((attention > average) & seen.bool()).float().cumsum(2), seen.cumsum(0)

    def before(token: int) -> History:
        last = token - 1
        numbers = torch.arange(token, dtype=torch.int32).expand(*attention.shape[:2], -1)
        latest, sums, square_sums, times = (t[:, :, last, :token] for t in (attention, total, squares, above))
        return History(numbers, latest, sums, square_sums, times, count[last, :token].expand_as(latest))

    return {token: before(token) for token in range(first, tokens)}


def chosen(policy: str, history: History, budget: int) -> Tensor:
    """The `budget` most important tokens [windows, H, b]. Among equals the newest stay, as when evicting."""
    importance = POLICIES[policy](history, budget, torch.Generator())
    return importance.argsort(dim=-1, stable=True)[..., -budget:]


def jaccard(ours: Tensor, theirs: Tensor) -> Tensor:
    """Mean |A ∩ B| / |A ∪ B| of sets of tokens [windows, H, b], -1 for none."""
    common = (ours[..., :, None] == theirs[..., None, :]).any(-1).sum(-1)
    either = (ours >= 0).sum(-1) + theirs.shape[-1] - common
    return (common / either).mean()
