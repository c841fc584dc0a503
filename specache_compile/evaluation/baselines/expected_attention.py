"""Expected Attention (arXiv 2510.00636, as in kvpress 0.5.5): each KV head keeps the pairs of a prompt that later
queries are expected to attend to. They are chosen once, after an exact prefill, by the distribution of the prompt's
queries."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specache_compile.errors import SpecacheError
from specache_compile.kernels.op import Op, fake_of_query
from specache_compile.kernels.state.center import partners, quarter_turn
from specache_compile.kernels.state.operands import AttentionInputs, takes
from specache_compile.methods.method import Method
from specache_compile.options import whole
from specache_compile.passes.recipe import OpCall, Recipe

from .prompt_eviction import FIELDS, Compressed, Prompt, PromptOptions, attend_and_keep, cost


@takes(new=AttentionInputs, kept=Compressed)
def expected_attention(
    new: AttentionInputs, kept: Compressed, budget: int, first: int, ahead: int, scale: float, softcap: float | None,
    frequencies: Tensor | None,
) -> Tensor:  # fmt: skip
    """Exact attention over the kept pairs and the new ones, which join them (`attend_and_keep`). Of a prompt longer
    than the budget b the b pairs stay that `chosen` names. frequencies [h]: RoPE's."""
    if frequencies is None:
        raise SpecacheError(
            "method='expected_attention': this model's graph turns no channels j and j + h by RoPE's frequencies [h], "
            "as Llama's does; take method='snapkv'"
        )

    def choose(prompt: Prompt) -> Tensor:
        tokens = prompt.pairs.shape[2]
        _, seen = prompt.attention_of(tokens - 1, tokens)
        return chosen(prompt, seen[:, :, 0], partners(frequencies, new.q.shape[-1]), budget, first, ahead)

    return attend_and_keep(new, kept, budget, scale, softcap, choose)


def chosen(prompt: Prompt, seen: Tensor, turning: tuple[Tensor, Tensor], budget: int, first: int, ahead: int) -> Tensor:
    """The positions [B, H, b] of the kept pairs of a prompt of n tokens, in ascending order.

    The first `first` seen pairs are kept, and those with the largest |v|·E[softmax(q·k)], averaged over the group.
    Among equals the newest is evicted.

    q is modelled as Gaussian, with the mean μ and covariance Σ of the prompt's queries before RoPE. Both are rotated by
    the mean of RoPE's rotations at the next `ahead` positions: E[exp(q·k)] = exp(μ·k + k·Σ·k / 2) (section 3).

    seen: bool [B, H, n]; unseen pairs have no weight and are evicted first.
    turning: θ and partner of each channel (`partners`).
    """
    (theta, partner), tokens = turning, prompt.pairs.shape[2]
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


ATTENTION = Op(
    "expected_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor cursor, "
    "Tensor(a!) compressed, Tensor(b!) compressed_token, int budget, int first, int ahead, float scale, "
    "float? softcap, Tensor? frequencies) -> Tensor",
    expected_attention, fake_of_query, f"{__name__}:expected_attention",
    cost=cost, is_work=True, capturable=False,
)  # fmt: skip


@dataclass(frozen=True)
class ExpectedAttentionOptions(PromptOptions):
    """The defaults are kvpress'."""

    method: str = "expected_attention"
    first: int = whole(4, 0, "first tokens of a prompt, which stay")
    ahead: int = whole(512, 1, "places behind the prompt at which queries are expected", metavar="TOKENS")


def recipe(options: ExpectedAttentionOptions, site: int) -> Recipe:
    settings = (options.budget_in_tokens(options.prompt), options.first, options.ahead)
    attend = OpCall("expected_attention", tuple(field.name for field in FIELDS), settings, turned=FIELDS[0].name)
    return Recipe(dict.fromkeys(("prefill", "extend", "decode"), attend), ())


METHOD = Method("expected_attention", ExpectedAttentionOptions, FIELDS, recipe)
