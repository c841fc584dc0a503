"""Prompts' beginnings that have been read, for the next prompt that begins so: pages are shared, not copied.

A beginning ends where a chunk and a page do. So whoever goes on from it reads the same chunks as without it, and has
the same tiers, bit for bit.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor
from transformers import DynamicCache

from specache_compile.caches.rows import drop
from specache_compile.kernels.state.page_table import PAGE


def ends_a_page(tokens: int, chunk: int) -> bool:
    """Whether a beginning of so many tokens ends where a chunk and a page do."""
    return tokens > 0 and tokens % math.lcm(chunk, PAGE) == 0


class Prefixes:
    """The beginnings that were used last.

    most: of them.
    kept: tokens int64 [n], and a cache of one row with these; the least recently used first.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.kept: list[tuple[Tensor, DynamicCache]] = []

    def longest(self, prompt: Tensor) -> tuple[int, DynamicCache | None]:
        """The number of a prompt's first tokens that are there, and their cache; the prompt's last token is not asked
        for."""
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
        """Keep what a cache of these tokens is now; it goes on."""
        if not self.most or any(torch.equal(ids, known) for known, _ in self.kept):
            return
        while len(self.kept) >= self.most:
            self.drop_oldest()
        self.kept.append((ids, copy.deepcopy(cache)))

    def drop_oldest(self) -> bool:
        """Whether there was one."""
        if not self.kept:
            return False
        drop(self.kept.pop(0)[1])
        return True
