"""Random tokens of a small attention, whose queries are so large that it is far from uniform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

BATCH, HEADS, GROUP, DIM = 2, 2, 2, 8


def tokens(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values."""
    make = torch.Generator().manual_seed(seed)
    q = torch.randn(BATCH, HEADS * GROUP, count, DIM, generator=make) * 2
    k, v = (torch.randn(BATCH, HEADS, count, DIM, generator=make) for _ in range(2))
    return q, k, v


def part(given: tuple[Tensor, ...], start: int, stop: int) -> tuple[Tensor, ...]:
    return tuple(x[:, :, start:stop] for x in given)


class Cache:
    """The kept pairs of an op, and its calls one after another."""

    def __init__(self, op: Any, pairs: int, settings: tuple[Any, ...], *state: Tensor) -> None:
        self.op, self.settings, self.state, self.length = op, settings, state, 0
        self.pairs = torch.full((BATCH, HEADS, pairs, 2, DIM), float("nan"))
        self.token = torch.full((BATCH, HEADS, pairs), -1, dtype=torch.int32)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, padding: Sequence[int] | None = None, sinks: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Encode new tokens; the first tokens of each row are padding."""
        start, stop = self.length, self.length + k.shape[2]
        self.length = stop
        if padding is not None:
            column, row = torch.arange(stop), torch.arange(start, stop)
            mask = (column >= torch.tensor(padding).view(-1, 1, 1, 1)) & (column <= row[:, None])
        given = (q, k, v, mask, sinks, torch.tensor([[start, 0, 0]]).repeat(BATCH, 1))
        out: Tensor = self.op(*given, self.pairs, self.token, *self.state, *self.settings, DIM**-0.5, None)
        return out

    def kept(self, row: int, head: int) -> list[int]:
        return [token for token in self.token[row, head].tolist() if token >= 0]


def attention(kept: list[int], row: int, head: int, token: int, given: tuple[Tensor, ...]) -> Tensor:
    """Return a token's outputs [G, d] over the kept tokens and itself, in float64."""
    q, k, v = (x.double() for x in given)
    group = slice(head * GROUP, (head + 1) * GROUP)
    seen = [*kept, token]
    return (q[row, group, token] @ k[row, head, seen].T * DIM**-0.5).softmax(-1) @ v[row, head, seen]
