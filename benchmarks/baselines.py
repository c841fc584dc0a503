"""The baseline caches of the GPU benchmarks: Hugging Face's caches, and a static cache in FP8.

Each cache is created for its context and filled with random pairs. `why_not` gives the reason if a baseline is
unavailable; the tables leave it out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, LlamaConfig, QuantizedCache, StaticCache
from transformers.cache_utils import StaticLayer

from specache_compile.bench import runners
from specache_compile.methods.field import LayerShape

FULL, OFFLOADED, STATIC = "HF DynamicCache", "HF DynamicCache, offloaded", "HF StaticCache, compiled"
FP8 = "fp8 StaticCache, compiled"
# They dequantise the whole cache in every step, one layer at a time.
QUANTIZED: dict[str, dict[str, Any]] = {
    f"HF QuantizedCache, {name}": runners.QUANTIZED[key]
    for name, key in (("quanto 2-bit", "quanto-2bit"), ("fp8", "hf-fp8"))
}
BASELINES = [FULL, OFFLOADED, STATIC, FP8, *QUANTIZED]
COMPILED = (STATIC, FP8)


def why_not(method: str, config: LlamaConfig, device: torch.device) -> str | None:
    """The reason why a baseline is unavailable; None if it is available."""
    if method == OFFLOADED and device.type != "cuda":
        return "Hugging Face's offloading requires a GPU"
    if method == FP8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return "Triton converts to e4m3 from compute capability 8.9 on"
    if method in QUANTIZED:
        try:
            QuantizedCache(config=config, **QUANTIZED[method])
        except (ImportError, ValueError) as error:
            return str(error).strip()
    return None


def pair_bytes(method: str, layer: LayerShape) -> float:
    """Bytes of a token's keys and values in one layer's cache."""
    elements = 2 * layer.heads * layer.head_dim
    if method == FP8 or QUANTIZED.get(method, {}).get("backend") == "fp8":
        return elements
    if method in QUANTIZED:  # 2-bit codes, and a scale and a zero point in 16 bits for each group of 64
        return elements * (2 + 32 / 64) / 8
    return elements * layer.dtype.itemsize


def layers_at_once(method: str) -> int:
    """The number of layers with a temporary 16-bit copy of all pairs on the device."""
    return 2 if method == OFFLOADED else int(method == FP8 or method in QUANTIZED)


class Fp8StaticLayer(StaticLayer):
    """Keys and values in e4m3 with a scale of 1, converted back to 16 bits for SDPA.

    The static layer stores the codes as bytes.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new = (states.to(torch.float8_e4m3fn).view(torch.uint8) for states in (key_states, value_states))
        keys, values = (codes.view(torch.float8_e4m3fn) for codes in super().update(*new, *args, **kwargs))
        return keys.to(key_states.dtype), values.to(value_states.dtype)


def forced_cache(
    method: str, config: LlamaConfig, layers: list[LayerShape], batch: int, context: int, most: int
) -> Cache:
    """A baseline's cache with `context` random tokens; a static one has room for `most`."""
    cache = empty_cache(method, config, most)
    for number, layer in enumerate(layers):
        shape = (batch, layer.heads, context, layer.head_dim)
        keys, values = (torch.randn(shape, dtype=layer.dtype, device=layer.device) for _ in range(2))
        cache.update(keys, values, number)
    return cache


def empty_cache(method: str, config: LlamaConfig, most: int) -> Cache:
    if method in QUANTIZED:
        return QuantizedCache(config=config, **QUANTIZED[method])
    if method not in COMPILED:
        return DynamicCache(config=config, offloading=method == OFFLOADED)
    cache = StaticCache(config=config, max_cache_len=most)
    if method == FP8:
        cache.layers = [Fp8StaticLayer(max_cache_len=most) for _ in cache.layers]
    return cache
