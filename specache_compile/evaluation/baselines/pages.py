"""Pages: a baseline selector that chooses runs of neighbouring tokens, as retrieval by page does (Quest, arXiv
2406.10774; ArkVale), in place of single tokens.

Quest and ArkVale bound a page's score by a summary of its keys. Here a page has its best token's score over the low-bit
keys, the most that a choice of whole pages can know.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specache_compile.kernels import costs
from specache_compile.kernels.op import Op, fake_nothing
from specache_compile.kernels.state.stored_tiers import EMPTY
from specache_compile.methods.specache import SpecacheOptions
from specache_compile.passes.recipe import Selector


def select_pages(scores: Tensor, wanted: Tensor, page: int) -> None:
    """Write the tokens of the k // page pages of the largest scores to wanted [B, H, k]; -1: none.

    scores [B, H, C]; below 0: no candidate. A page's score is its tokens' largest.
    """
    count = wanted.shape[-1] // page
    pages = F.pad(scores, (0, -scores.shape[-1] % page), value=-1.0).unflatten(-1, (-1, page))
    best = pages.amax(-1).topk(min(count, pages.shape[2]), dim=-1).indices.unsqueeze(-1)
    there = pages.gather(2, best.expand(-1, -1, -1, page)) >= 0
    tokens = best * page + torch.arange(page, device=scores.device)
    wanted.fill_(EMPTY)
    wanted[..., : best.shape[2] * page] = tokens.masked_fill(~there, EMPTY).flatten(2)


SELECT = Op(
    "select_pages(Tensor scores, Tensor(a!) wanted, int page) -> ()",
    select_pages, fake_nothing, f"{__name__}:select_pages",
    cost=costs.select_topk, early=0,
)  # fmt: skip


def selector(options: SpecacheOptions) -> Selector:
    return Selector("select_pages", settings=(options.page_size,))
