"""Expected Attention's selection against kvpress."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from conftest import eager, step
from families import Family
from specache_compile.errors import SpecacheError
from specache_compile.evaluation.baselines.prompt_eviction import prompt_attention

KVPRESS = load_file(Path(__file__).with_name("kvpress.safetensors"))
FIRST, AHEAD = 4, 512


def kept_of(
    q: Tensor, k: Tensor, v: Tensor, budget: int, frequencies: Tensor | None, padding: list[int] | None = None
) -> Tensor:
    """Return the op's kept tokens [B, H, b]."""
    batch, heads, tokens, d = k.shape
    pairs, token = torch.zeros(batch, heads, tokens, 2, d), torch.full((batch, heads, tokens), -1, dtype=torch.int32)
    mask = None
    if padding is not None:
        column = torch.arange(tokens)
        mask = (column >= torch.tensor(padding).view(-1, 1, 1, 1)) & (column <= column[:, None])
    cursor = torch.zeros(batch, 3, dtype=torch.int64)
    settings = ("expected_attention", budget, [FIRST, AHEAD], d**-0.5, None, frequencies)
    prompt_attention(q, k, v, mask, None, cursor, pairs, token, *settings)
    assert (token[:, :, budget:] == -1).all()
    kept = token[:, :, :budget].long()
    assert torch.equal(pairs[:, :, :budget, 1], v.gather(2, kept[..., None].expand(*kept.shape, d)))
    return kept


@pytest.mark.parametrize("layer", [0, 1])
def test_it_keeps_what_kvpress_keeps(layer: int) -> None:
    q, k, v, expected = (KVPRESS[f"{name}{layer}"] for name in ("q", "k", "v", "kept"))
    kept = kept_of(q, k, v, expected.shape[-1], KVPRESS["frequencies"])
    assert torch.equal(kept, expected)
    assert not torch.equal(kept[:, 0], kept[:, 1])


def test_padding_counts_nowhere_and_moves_no_place() -> None:
    """A left-padded row keeps the same tokens as without padding."""
    make = torch.Generator().manual_seed(3)
    frequencies, hidden, tokens, budget = 0.7 ** torch.arange(4.0), 7, 40, 14
    q, k = (torch.randn(1, heads, tokens, 8, generator=make) * 2 for heads in (4, 2))
    v = torch.randn(1, 2, tokens, 8, generator=make)
    kept = kept_of(q, k, v, budget, frequencies, [hidden])
    alone = kept_of(q[:, :, hidden:], k[:, :, hidden:], v[:, :, hidden:], budget, frequencies)
    assert torch.equal(kept, hidden + alone)


def test_a_budget_of_fewer_than_the_first_tokens_keeps_the_first_of_them() -> None:
    q, k, v = (torch.randn(1, heads, 20, 8) for heads in (4, 2, 2))
    assert kept_of(q, k, v, 2, 0.7 ** torch.arange(4.0)).tolist() == [[[0, 1], [0, 1]]]


def test_a_model_whose_rope_turns_neighbours_is_refused() -> None:
    """Cohere has frequencies, but for other pairs of channels."""
    plain = Family("cohere", "CohereConfig", {"num_hidden_layers": 1}).model()
    model = eager(plain, method="expected_attention", budget=30)
    with pytest.raises(SpecacheError, match=r"turns no channels j and j \+ h .* take method='snapkv'"):
        step(model, torch.randint(0, 64, (1, 90)))
