"""Quantised weights of other libraries: the cache is held and compressed beside them, and tokens are the uncompiled
model's. A library that is missing is a failure here."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM

import specache_compile as sc
from conftest import LOSSLESS, greedy, prompt, tiny_llama
from specache_compile.runtime.records import find_record

pytestmark = pytest.mark.slow


def small() -> LlamaForCausalLM:
    return tiny_llama(num_hidden_layers=1, intermediate_size=128)  # of whole blocks of 64


@pytest.mark.quick_for("Int8WeightOnlyConfig-eager")
@pytest.mark.parametrize(
    ("config", "lowering"),
    [
        ("Int8WeightOnlyConfig", "eager"),
        ("Int8WeightOnlyConfig", "inductor"),
        ("Int8DynamicActivationInt8WeightConfig", "eager"),  # Inductor itself rounds some activations to other codes
    ],
)
def test_torchaos_int8_weights_run_two_lanes(config: str, lowering: str) -> None:
    """Their class knows what a linear layer is, and no transposition."""
    from torchao import quantization

    model = small()
    quantization.quantize_(model, getattr(quantization, config)())
    expected = greedy(model, prompt(40), 5)
    model.compile(backend="specache", options={**LOSSLESS, "lowering": lowering})
    assert torch.equal(greedy(model, prompt(40), 5), expected)
    assert sc.stats(model).lanes == 2


def saved(folder: Path, **config: Any) -> LlamaForCausalLM:
    """A model with bitsandbytes' weights, as it is loaded from a folder."""
    small().save_pretrained(folder)
    settings = BitsAndBytesConfig(**config)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=torch.float32).eval()


def test_bitsandbytes_8_bit_weights_have_statistics(tmp_path: Path) -> None:
    """Each of their products is a graph break, so that the attention's graph has no weights among its inputs."""
    model, plain = (saved(tmp_path, load_in_8bit=True) for _ in range(2))
    model.compile(backend="specache", options=LOSSLESS)
    assert torch.equal(greedy(model, prompt(40), 5), greedy(plain, prompt(40), 5))
    assert sc.stats(model).decodes == 4


# The library packs them for processors with such products alone.
@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="this processor multiplies no bfloat16")
def test_bitsandbytes_4_bit_weights_are_packed_in_the_first_generation_and_rewritten_from_the_second(
    tmp_path: Path,
) -> None:
    model, plain = (saved(tmp_path, load_in_4bit=True) for _ in range(2))
    model.compile(backend="specache", options=LOSSLESS)
    with pytest.warns(sc.SpecacheWarning, match=r"packed in its first call .*the next generation is rewritten"):
        tokens = greedy(model, prompt(40), 3)
    assert torch.equal(tokens, greedy(plain, prompt(40), 3))
    record = find_record(model)
    assert record is None or record.latest is None
    with warnings.catch_warnings():
        warnings.simplefilter("error", sc.SpecacheWarning)
        assert torch.equal(greedy(model, prompt(40, seed=2), 3), greedy(plain, prompt(40, seed=2), 3))
    assert sc.stats(model).decodes == 2
