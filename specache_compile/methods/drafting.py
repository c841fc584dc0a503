"""Options of drafting: an approximate decode step is a draft, which an exact pass over the host tier verifies (arXiv
2404.11912)."""

from __future__ import annotations

from dataclasses import dataclass

from specache_compile.kernels.attention.attention_ops import BLOCK
from specache_compile.options import accepting, number_or_auto, option

from .host_tier import HostOptions


@dataclass(frozen=True)
class DraftOptions(HostOptions):
    """Options of the methods with an approximate decode step and all pairs in a host tier."""

    verify: int | str | None = option(
        None, accepting(
            lambda n: n in (None, "auto") or (type(n) is int and 1 <= n <= BLOCK),
            f"accepted are 1 to {BLOCK} tokens, 'auto' and None",
        ),
        "tokens that the decode phase drafts and one exact pass over the host tier verifies, so that generate returns "
        "the full cache's tokens. auto: the number with the most tokens per second", type=number_or_auto, metavar="N",
    )  # fmt: skip
