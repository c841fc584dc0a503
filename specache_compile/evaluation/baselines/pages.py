"""Pages: SpeCache that fetches whole pages of neighbouring tokens, as Quest (arXiv 2406.10774) and ArkVale do, without
correction.

Quest and ArkVale bound a page's score by a summary of its keys. Here a page has its best token's score over the low-bit
keys, the most that a choice of whole pages can know.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specache_compile.errors import OptionError
from specache_compile.kernels.op import Op, fake_nothing
from specache_compile.kernels.state.layout import EMPTY
from specache_compile.methods import specache
from specache_compile.methods.specache import SpecacheOptions
from specache_compile.options import whole
from specache_compile.passes.recipe import OpCall, Recipe, named


def select_pages(scores: Tensor, selected: Tensor, page: int) -> None:
    """Write the tokens of the k // page pages with the largest scores to `selected`.

    scores: [B, H, C]; a token below 0 is no candidate. A page's score is the largest of its tokens.
    selected: [B, H, k]; -1 in unused entries.
    """
    count = selected.shape[-1] // page
    pages = F.pad(scores, (0, -scores.shape[-1] % page), value=-1.0).unflatten(-1, (-1, page))
    best = pages.amax(-1).topk(min(count, pages.shape[2]), dim=-1).indices.unsqueeze(-1)
    there = pages.gather(2, best.expand(-1, -1, -1, page)) >= 0
    tokens = best * page + torch.arange(page, device=scores.device)
    selected.fill_(EMPTY)
    selected[..., : best.shape[2] * page] = tokens.masked_fill(~there, EMPTY).flatten(2)


SELECT = Op(
    "select_pages(Tensor scores, Tensor(a!) selected, int page) -> ()",
    select_pages, fake_nothing, f"{__name__}:select_pages",
    early=0,
)  # fmt: skip


@dataclass(frozen=True)
class PagesOptions(SpecacheOptions):
    """Those of `specache`, with k the tokens of all fetched pages."""

    method: str = "pages"
    top_k: int = whole(64, 0, "k: pairs to fetch for each layer and KV head; 0: none", metavar="K")
    page_size: int = whole(16, 1, "tokens of a page", metavar="TOKENS")
    corrects = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.top_k < self.page_size:
            raise OptionError(f"option page_size={self.page_size}: a page does not fit top_k={self.top_k}")


def recipe(options: PagesOptions, site: int) -> Recipe:
    selector = OpCall("select_pages", named("selected"), {"page": options.page_size}) if options.top_k else None
    return replace(specache.recipe(options, site), selector=selector)


METHOD = replace(specache.METHOD, name="pages", options=PagesOptions, recipe=recipe)
