"""The option memory: the most bits under which the tiers on the device fit, for explain and for a session alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import specache_compile as sc
from conftest import compiled_with, greedy, prompt
from specache_compile.errors import OptionError
from specache_compile.methods import parse_options
from specache_compile.methods.field import LayerShape
from specache_compile.options import bytes_of_memory
from specache_compile.runtime.memory_option import device_bytes, within_memory
from specache_compile.runtime.session import Session
from specache_compile.runtime.tiers import options_at

LAYERS = [LayerShape(8, 128, torch.bfloat16, torch.device("meta"))] * 32


@pytest.mark.parametrize(
    ("memory", "bits"), [("18 GiB", 16), ("9 GiB", 8), ("4 GiB", 2), ("2 GiB", 1.5), (3 * 2**29, 1)]
)
def test_the_most_bits_that_fit_are_taken(memory: int | str, bits: float) -> None:
    requested = parse_options({"memory": memory, "top_k": 32, "min_context": 10**6})
    chosen = options_at(requested, LAYERS, 4, prompt=32_768, tokens=32_768)
    assert (chosen.bits, chosen.top_k, chosen.memory) == (bits, 32, memory)
    allowed = bytes_of_memory(memory)
    assert device_bytes(chosen, LAYERS, 4, 32_768) <= allowed
    more = [other for other in (1, 1.5, 2, 4, 8, 16) if other > bits]
    assert all(device_bytes(replace(requested, bits=other), LAYERS, 4, 32_768) > allowed for other in more)
    assert within_memory(chosen, LAYERS, 4, 32_768) == chosen


@pytest.mark.parametrize("option", [{"value_code": "trellis"}, {"param_bits": 8}], ids=str)
def test_codes_that_some_bits_refuse_go_by_the_bits_that_are_taken(option: dict[str, Any]) -> None:
    requested = parse_options({"memory": "9 GiB", **option})
    assert options_at(requested, LAYERS, 4, prompt=32_768, tokens=32_768).bits == 8


def test_too_little_is_an_error_where_a_cache_begins_alone() -> None:
    """Its graphs are compiled for the lengths that it grows to as well."""
    requested = parse_options({"memory": "1 MiB"})
    with pytest.raises(OptionError, match="200 tokens x batch 1 need"):
        Session(requested, LAYERS, 1, 200)
    assert options_at(requested, LAYERS, 1, prompt=10**5, tokens=10**5 + 1).bits == 1


@pytest.mark.slow
def test_explain_shows_what_a_session_takes_and_too_little_is_an_error(
    llama: LlamaForCausalLM,
) -> None:
    options = {"memory": "60 KiB", "lowering": "eager", "group_size": 32, "residual_length": 32, "top_k": 8}
    explained = sc.explain(llama, prompt_length=200, options=options)
    assert explained.options.bits == 2
    assert "memory 60 KiB: bits 2 fit" in str(explained)
    twin = compiled_with(llama, options)
    greedy(twin, prompt(200), 3)
    measured = sc.stats(twin).bytes_by_tier
    assert sum(size for tier, size in measured.items() if tier != "host") == explained.device_bytes <= 60 * 1024
    greedy(twin, prompt(250), 10)  # beyond what was allocated for the prompt
    with pytest.raises(OptionError, match="200 tokens x batch 1 need"):
        sc.explain(llama, prompt_length=200, options={**options, "memory": "1 KiB"})
