"""Cached prompt prefixes: a later prompt with the same prefix shares their pages.

A prefix ends at the end of a chunk and of a page. So a request that starts from it prefills the same chunks as without
it, and has the same tiers bit for bit.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor
from transformers import DynamicCache

from specache_compile.caches.joining import drop
from specache_compile.kernels.state.page_table import PAGE


def ends_a_page(tokens: int, chunk: int) -> bool:
    """Whether so many tokens end at the end of a chunk and of a page."""
    return tokens > 0 and tokens % math.lcm(chunk, PAGE) == 0


class Prefixes:
    """The most recently used prefixes.

    most: the limit of their number.
    kept: token ids int64 [n] and a cache of one row with these; the least recently used first.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.kept: list[tuple[Tensor, DynamicCache]] = []

    def longest(self, prompt: Tensor) -> tuple[int, DynamicCache | None]:
        """Length and cache of the longest cached prefix of a prompt, without the prompt's last token."""
        fitting = [
            (len(ids), number)
            for number, (ids, _) in enumerate(self.kept)
            if len(ids) < len(prompt) and torch.equal(ids, prompt[: len(ids)])
        ]
        if not fitting:
            return 0, None
        length, number = max(fitting)
        self.kept.append(self.kept.pop(number))
        return length, self.kept[-1][1]

    def put(self, ids: Tensor, cache: DynamicCache) -> None:
        """Cache a copy of a cache with these tokens."""
        if not self.most or any(torch.equal(ids, known) for known, _ in self.kept):
            return
        while len(self.kept) >= self.most:
            self.drop_oldest()
        self.kept.append((ids, copy.deepcopy(cache)))

    def drop_oldest(self) -> bool:
        """Drop the least recently used prefix; whether there was one."""
        if not self.kept:
            return False
        drop(self.kept.pop(0)[1])
        return True
