"""Prefills on a CUDA device, against the uncompiled model there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from conftest import LOSSLESS, prompt

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "options", [{"bits": 16, "top_k": 0, "min_context": 0}, {**LOSSLESS, "lowering": "inductor"}], ids=["16", "1"]
)
def test_inductor_runs_a_prefill_without_a_mask(llama: LlamaForCausalLM, options: dict[str, Any]) -> None:
    twin = copy.deepcopy(llama.cuda())
    twin.compile(backend="specache", options=options)
    ids = prompt(100).cuda()
    with torch.no_grad():
        torch.testing.assert_close(
            twin(ids, use_cache=True).logits, llama(ids, use_cache=True).logits, atol=1e-3, rtol=0
        )
