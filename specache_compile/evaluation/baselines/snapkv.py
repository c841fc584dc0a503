"""SnapKV (arXiv 2404.14469): each KV head keeps the pairs that a prompt's last queries attend to, chosen once after an
exact prefill. All later pairs stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specache_compile.kernels.op import Op, fake_of_query
from specache_compile.kernels.state.operands import AttentionInputs, takes
from specache_compile.methods.method import Method
from specache_compile.options import accepting, choice, option, whole
from specache_compile.passes.recipe import OpCall, Recipe

from .prompt_eviction import FIELDS, Compressed, Prompt, PromptOptions, attend_and_keep, cost

POOLINGS: dict[str, Callable[..., Tensor]] = {"max": F.max_pool1d, "average": F.avg_pool1d}


@takes(new=AttentionInputs, kept=Compressed)
def snapkv_attention(
    new: AttentionInputs, kept: Compressed, budget: int, window: int, kernel: int, pooling: str, scale: float,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """Exact attention over the kept pairs and the new ones, which join them (`attend_and_keep`). Of a prompt longer
    than the budget b the b pairs stay that `chosen` names."""

    def choose(prompt: Prompt) -> Tensor:
        tokens = prompt.pairs.shape[2]
        attention, seen = prompt.attention_of(tokens - min(window, budget), tokens)
        return chosen(attention, seen[:, :, -1], budget, kernel, pooling)

    return attend_and_keep(new, kept, budget, scale, softcap, choose)


def chosen(attention: Tensor, seen: Tensor, budget: int, kernel: int, pooling: str) -> Tensor:
    """The positions [B, H, b] of the kept pairs of a prompt of n tokens, in ascending order.

    The w pairs of the window are kept, and the b - w earlier pairs with the most votes. Among equals the oldest is
    evicted. A pair's votes are its attention, summed over the window's queries, pooled over neighbours so that a
    passage stays whole, and averaged over the query group.

    attention: [B, H, G, w, n].
    seen: bool [B, H, n]; unseen pairs are evicted first.
    kernel: the number of pooled neighbours, odd.
    """
    window, tokens = attention.shape[3:]
    before = tokens - window
    votes = attention.sum(3)[..., :before]
    pooled = POOLINGS[pooling](votes.flatten(0, 1), kernel, stride=1, padding=kernel // 2).view(votes.shape).mean(2)
    order = pooled.masked_fill(~seen[..., :before], -math.inf).argsort(dim=-1, stable=True)
    newest = torch.arange(before, tokens, device=attention.device).expand(*order.shape[:2], -1)
    return torch.cat([order[..., tokens - budget :].sort(dim=-1).values, newest], -1)


ATTENTION = Op(
    "snapkv_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor cursor, "
    "Tensor(a!) compressed, Tensor(b!) compressed_token, int budget, int window, int kernel, str pooling, "
    "float scale, float? softcap) -> Tensor",
    snapkv_attention, fake_of_query, f"{__name__}:snapkv_attention",
    cost=cost, is_work=True, capturable=False,
)  # fmt: skip


@dataclass(frozen=True)
class SnapKVOptions(PromptOptions):
    """The defaults are the paper's on LongBench."""

    method: str = "snapkv"
    window: int = whole(32, 1, "w: last queries of the prompt, which choose, and whose own pairs stay", metavar="W")
    kernel: int = option(
        7,
        accepting(lambda n: type(n) is int and n >= 1 and n % 2, "give an odd number of tokens, 1 or more"),
        "neighbours over which a token's votes are pooled",
        type=int,
        metavar="TOKENS",
    )
    pooling: str = choice("max", tuple(POOLINGS), "how they are pooled")


def recipe(options: SnapKVOptions, site: int) -> Recipe:
    settings = (options.budget_in_tokens(options.prompt), options.window, options.kernel, options.pooling)
    attend = OpCall("snapkv_attention", tuple(field.name for field in FIELDS), settings)
    return Recipe(dict.fromkeys(("prefill", "extend", "decode"), attend), ())


METHOD = Method("snapkv", SnapKVOptions, FIELDS, recipe)
