"""Random tokens of a small attention, whose queries are so large that it is far from uniform."""

from __future__ import annotations

from collections.abc import Sequence

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


def step_of(length: int, new: int, padding: Sequence[int] | None) -> tuple[Tensor, Tensor | None]:
    """Return the cursor and the mask of `new` tokens after `length`; the first tokens of each row are padding."""
    cursor = torch.tensor([[length, 0, 0]]).repeat(BATCH, 1)
    if padding is None:
        return cursor, None
    column, row = torch.arange(length + new), torch.arange(length, length + new)
    return cursor, (column >= torch.tensor(padding).view(-1, 1, 1, 1)) & (column <= row[:, None])


def attention(kept: list[int], row: int, head: int, token: int, given: tuple[Tensor, ...]) -> Tensor:
    """Return a token's outputs [G, d] over the kept tokens and itself, in float64."""
    q, k, v = (x.double() for x in given)
    group = slice(head * GROUP, (head + 1) * GROUP)
    seen = [*kept, token]
    return (q[row, group, token] @ k[row, head, seen].T * DIM**-0.5).softmax(-1) @ v[row, head, seen]
