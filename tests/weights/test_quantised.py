"""Models whose weights another library has quantised generate as they do uncompiled, with the cache compressed. A
missing library is a failure."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DynamicCache, LlamaForCausalLM

import specache_compile as sc
from conftest import LOSSLESS, greedy, is_held, prompt, tiny_llama
from specache_compile import SpecacheWarning
from specache_compile.compat import with_cache
from specache_compile.runtime.records import find_record

pytestmark = pytest.mark.slow


def linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Its linear layers but the last, each with the module and the name that hold it."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            owner, _, place = name.rpartition(".")
            yield model.get_submodule(owner), place, layer


# Each imports its library itself, so that nobody pays for them who does not run these tests.


def quanto(model: nn.Module, weights: str) -> None:
    from optimum import quanto as library

    library.quantize(model, weights=getattr(library, weights), exclude="lm_head")
    library.freeze(model)


def torchao(model: nn.Module, config: str, **settings: Any) -> None:
    from torchao import quantization

    groups = {name: quantization.PerGroup(32) for name in settings.pop("in_groups", ())}
    quantization.quantize_(model, getattr(quantization, config)(**settings, **groups))


def hqq(model: nn.Module, nbits: int) -> None:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    config = BaseQuantizeConfig(nbits=nbits, group_size=32)
    for owner, place, layer in linears(model):
        setattr(owner, place, HQQLinear(layer, config, compute_dtype=torch.float32, device="cpu"))


INT4 = {"weight_dtype": torch.int4}
QUANTISED: dict[str, Callable[[nn.Module], None]] = {
    "quanto_int8": partial(quanto, weights="qint8"),
    "quanto_fp8": partial(quanto, weights="qfloat8"),
    "hqq_2bit": partial(hqq, nbits=2),
    "hqq_4bit": partial(hqq, nbits=4),
    "torchao_int4": partial(torchao, config="IntxWeightOnlyConfig", in_groups=["granularity"], **INT4),
    "torchao_int4_on_int8_activations": partial(
        torchao, config="Int8DynamicActivationIntxWeightConfig", in_groups=["weight_granularity"], **INT4
    ),
    "torchao_fp8": partial(torchao, config="Float8WeightOnlyConfig"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("quantise", QUANTISED.values(), ids=QUANTISED)
def test_tokens_equal_the_uncompiled_quantised_models(quantise: Callable[[nn.Module], None]) -> None:
    def quantised() -> Any:
        model = tiny_llama(num_hidden_layers=1)
        quantise(model)
        return model.eval()

    ids, model, plain = prompt(60), quantised(), quantised()
    logits, whole = plain(ids).logits, tiny_llama(num_hidden_layers=1)(ids).logits
    assert not torch.allclose(logits, whole, atol=1e-3), "the weights must have changed"
    model.compile(backend="specache", options=LOSSLESS)
    with warnings.catch_warnings(action="error", category=SpecacheWarning):
        warnings.filterwarnings("ignore", message="this model's decode runs one token at a time")
        for new in (16, 8):
            cache = DynamicCache()
            assert torch.equal(greedy(model, ids, new, **with_cache(cache)), greedy(plain, ids, new))
            assert is_held(cache)


def small() -> LlamaForCausalLM:
    return tiny_llama(num_hidden_layers=1, intermediate_size=128)  # of whole blocks of 64


@pytest.mark.parametrize(
    ("config", "lowering"),
    [
        ("Int8WeightOnlyConfig", "eager"),
        ("Int8WeightOnlyConfig", "inductor"),
        ("Int8DynamicActivationInt8WeightConfig", "eager"),  # Inductor itself rounds some activations to other codes
    ],
)
def test_torchaos_int8_weights_run_one_lane(config: str, lowering: str) -> None:
    """Inside a vmap rule torch bypasses their class."""
    model = small()
    torchao(model, config)
    expected = greedy(model, prompt(40), 5)
    model.compile(backend="specache", options={**LOSSLESS, "lowering": lowering})
    assert torch.equal(greedy(model, prompt(40), 5), expected)
    assert sc.stats(model).lanes == 1


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
    with warnings.catch_warnings(action="error", category=sc.SpecacheWarning):
        assert torch.equal(greedy(model, prompt(40, seed=2), 3), greedy(plain, prompt(40, seed=2), 3))
    assert sc.stats(model).decodes == 2
