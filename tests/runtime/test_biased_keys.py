"""Models whose keys have large biases, as Qwen2's do: 2 bits serve them as well as others, where keys are centered."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from conftest import prompt, tiny_llama
from one_trace import compile_by_options
from specache_compile.compat import cache_of, with_cache

KIVI = {"method": "kivi", "lowering": "eager", "bits": 2, "rotate": True, "group_size": 32, "residual_length": 32}
STEPS = 24


def with_biased_keys(model: LlamaForCausalLM, size: float) -> LlamaForCausalLM:
    """A copy with biases up to `size` in three pairs of channels of each head. The query is smaller there by as much,
    as after training; else the bias would determine all attention."""
    twin = copy.deepcopy(model)
    for layer in twin.model.layers:
        attention, d = layer.self_attn, twin.config.head_dim
        for pair in (1, 3, 6):
            for channel in (pair, pair + d // 2):
                attention.k_proj.bias.data[channel::d] = size * (0.5 + pair / 12)
                attention.q_proj.weight.data[channel::d] *= 2 / size
    return twin


@torch.no_grad()
def logprobs(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Of the tokens after each of the last, fed one by one behind an exact prefill."""
    out = model(ids[:, :-STEPS], use_cache=True)
    found = []
    for place in range(ids.shape[1] - STEPS, ids.shape[1]):
        out = model(ids[:, place : place + 1], **with_cache(cache_of(out)), use_cache=True)
        found.append(out.logits[:, -1].log_softmax(-1))
    return torch.stack(found, 1)


def distance(model: LlamaForCausalLM, options: dict[str, object], ids: Tensor) -> float:
    """KL(uncompiled ‖ compiled), nats, the mean."""
    twin = copy.deepcopy(model)
    compile_by_options(twin, options)
    exact, found = logprobs(model, ids), logprobs(twin, ids)
    return float((exact.exp() * (exact - found)).sum(-1).mean())


def test_biased_keys_cost_nothing_where_keys_are_centered() -> None:
    free = tiny_llama(attention_bias=True, head_dim=32, initializer_range=0.15)
    ids, biased = prompt(350, batch=2), with_biased_keys(free, 900.0)
    plain, centered, moved, usual = (
        distance(model, {**KIVI, "center": center, "min_context": least}, ids)
        for model, center, least in (
            (biased, "never", 0),
            (biased, "auto", 0),
            (biased, "auto", ids.shape[1] - STEPS // 2),
            (free, "never", 0),
        )
    )
    assert plain > 4 * centered
    assert centered < 1.2 * usual
    assert moved < centered, "half of its steps are in 16 bits"
