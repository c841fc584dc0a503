"""Models whose weights another library has quantised generate as they do uncompiled, with the cache compressed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from conftest import LOSSLESS, greedy, prompt, tiny_llama
from specache_compile import SpecacheWarning
from specache_compile.compat import with_cache
from specache_compile.runtime.held import HeldTensor

pytestmark = pytest.mark.slow


def linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Its linear layers but the last, each with the module and the name that hold it."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            owner, _, place = name.rpartition(".")
            yield model.get_submodule(owner), place, layer


# Each imports its library itself, so that nobody pays for them who does not run these tests.


def quanto_int8(model: nn.Module) -> None:
    from optimum.quanto import freeze, qint8, quantize

    quantize(model, weights=qint8, exclude="lm_head")
    freeze(model)


def torchao_int4(model: nn.Module) -> None:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    quantize_(model, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))


def torchao_int4_on_int8_activations(model: nn.Module) -> None:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_

    quantize_(model, Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32)))


def torchao_fp8(model: nn.Module) -> None:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    quantize_(model, Float8WeightOnlyConfig())


def quanto_fp8(model: nn.Module) -> None:
    from optimum.quanto import freeze, qfloat8, quantize

    quantize(model, weights=qfloat8, exclude="lm_head")
    freeze(model)


def hqq_2bit(model: nn.Module) -> None:
    hqq(model, 2)


def hqq_4bit(model: nn.Module) -> None:
    hqq(model, 4)


def hqq(model: nn.Module, bits: int) -> None:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    config = BaseQuantizeConfig(nbits=bits, group_size=32)
    for owner, place, layer in linears(model):
        setattr(owner, place, HQQLinear(layer, config, compute_dtype=torch.float32, device="cpu"))


def bitsandbytes_8bit(model: nn.Module) -> None:
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    for owner, place, layer in linears(model):
        kept = {"has_fp16_weights": False, "threshold": 6.0}  # as Hugging Face loads them
        new = Linear8bitLt(layer.in_features, layer.out_features, bias=False, **kept)
        new.weight = Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
        setattr(owner, place, new.to("cpu"))


@pytest.mark.quick_for("quanto_int8", "hqq_4bit", "torchao_int4")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "quantise",
    [
        quanto_int8, quanto_fp8, hqq_2bit, hqq_4bit, bitsandbytes_8bit, torchao_int4, torchao_int4_on_int8_activations,
        torchao_fp8,
    ],
    ids=lambda one: one.__name__,
)  # fmt: skip
def test_tokens_equal_the_uncompiled_quantised_models(quantise: Callable[[nn.Module], None]) -> None:
    def quantised() -> Any:
        model = tiny_llama(num_hidden_layers=1)
        quantise(model)
        return model.eval()

    ids, model, plain = prompt(60), quantised(), quantised()
    logits, whole = plain(ids).logits, tiny_llama(num_hidden_layers=1)(ids).logits
    assert not torch.allclose(logits, whole, atol=1e-3), "the weights must have changed"
    model.compile(backend="specache", options=LOSSLESS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecacheWarning)
        warnings.filterwarnings("ignore", message="this model's decode runs one token at a time")
        for new in (16, 8):
            cache = DynamicCache()
            assert torch.equal(greedy(model, ids, new, **with_cache(cache)), greedy(plain, ids, new))
            assert isinstance(cache.layers[0].keys, HeldTensor)
