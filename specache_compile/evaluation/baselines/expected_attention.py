"""Expected Attention (arXiv 2510.00636, as in kvpress 0.5.5): each KV head keeps the pairs of a prompt that later
queries are expected to attend to. They are chosen once, after an exact prefill, by the distribution of the prompt's
queries."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specache_compile.errors import SpecacheError
from specache_compile.kernels.state.center import partners, quarter_turn
from specache_compile.options import whole

from .prompt_eviction import Prompt, PromptOptions, method_of


def choose(prompt: Prompt, budget: int, first: int, ahead: int) -> Tensor:
    """The first `first` seen pairs are kept, and those with the largest |v|·E[softmax(q·k)], averaged over the group.
    Among equals the newest is evicted; pairs that the newest query does not see have no weight and are evicted first.

    q is modelled as Gaussian, with the mean μ and covariance Σ of the prompt's queries before RoPE. Both are rotated by
    the mean of RoPE's rotations at the next `ahead` positions: E[exp(q·k)] = exp(μ·k + k·Σ·k / 2) (section 3).
    """
    if prompt.frequencies is None:
        raise SpecacheError(
            "method='expected_attention': this model's graph turns no channels j and j + h by RoPE's frequencies [h], "
            "as Llama's does; take method='snapkv'"
        )
    tokens = prompt.pairs.shape[2]
    theta, partner = partners(prompt.frequencies, prompt.query.shape[-1])
    seen = prompt.attention_of(tokens - 1, tokens)[1][:, :, 0]
    place = torch.arange(tokens + ahead, dtype=torch.float32, device=theta.device)
    cosine, sine = (place[:, None] * theta).cos(), (place[:, None] * theta).sin()
    unturned = prompt.query * cosine[:tokens] - quarter_turn(prompt.query, partner) * sine[:tokens]
    counts = seen & (seen.cumsum(-1) > first)  # [B, H, n]
    weight = (counts / counts.sum(-1, keepdim=True).clamp(min=1))[:, :, None, :, None]
    mean = (unturned * weight).sum(3, keepdim=True)
    off = unturned - mean
    spread = off.mT @ (off * weight)  # [B, H, G, d, d]

    def turned(x: Tensor) -> Tensor:
        return x * cosine[tokens:].mean(0) + quarter_turn(x, partner) * sine[tokens:].mean(0)

    mean, spread = turned(mean), turned(turned(spread).mT)
    keys, values = (x.float() for x in prompt.pairs.unbind(3))
    keys = keys.unsqueeze(2)
    expected = (mean @ keys.mT).squeeze(3) + ((keys @ spread) * keys).sum(-1) / 2
    # Where nothing counts, softmax is NaN.
    expected = expected.masked_fill(~counts.unsqueeze(2), -math.inf).softmax(-1).nan_to_num(0.0)
    score = expected.mean(2) * values.norm(dim=-1)
    score = score.masked_fill(seen & ~counts, math.inf).masked_fill(~seen, -math.inf)
    return score.argsort(dim=-1, descending=True, stable=True)[..., :budget].sort(dim=-1).values


@dataclass(frozen=True)
class ExpectedAttentionOptions(PromptOptions):
    """The defaults are kvpress'."""

    method: str = "expected_attention"
    first: int = whole(4, 0, "first tokens of a prompt, which stay")
    ahead: int = whole(512, 1, "places behind the prompt at which queries are expected", metavar="TOKENS")


METHOD = method_of("expected_attention", ExpectedAttentionOptions, choose, ("first", "ahead"), turned=True)
