"""A default device that a program has set applies to its own tensors, not to ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from conftest import LOSSLESS, compiled_with, prompt, tiny_llama
from specache_compile.compat import with_cache

# Nothing can be computed there: what we made without saying where is found out.
ELSEWHERE = "meta"
SETTINGS: dict[str, dict[str, Any]] = {
    "specache": LOSSLESS,
    "kcache": {"method": "kcache", "lowering": "eager", "top_n": 4096},
    "random": {"method": "random", "lowering": "eager", "budget": 1024},
}


@torch.no_grad()
def logits_of(model: Any, ids: Tensor, rows: Tensor) -> Tensor:
    """Of each token [B, 1] behind the first 70, with the rows in another order from the 80th on."""
    cache, found = DynamicCache(), []
    model(ids[:, :70], **with_cache(cache))
    for step in range(70, ids.shape[1]):
        if step == 80:
            cache.reorder_cache(rows)
        found.append(model(ids[:, step : step + 1], **with_cache(cache)).logits)
    return torch.cat(found, 1)


@pytest.mark.quick_for("specache", "random")
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_steps_and_reordered_rows_are_the_uncompiled_models(options: dict[str, Any]) -> None:
    model, ids, rows = tiny_llama(num_hidden_layers=1), prompt(110, 2), torch.tensor([1, 1])
    expected = logits_of(model, ids, rows)
    twin = compiled_with(model, options)
    with torch.device(ELSEWHERE):
        found = logits_of(twin, ids, rows)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
