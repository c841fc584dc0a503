"""The model to measure: a checkpoint, or a config with random weights."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

from specache_compile.checkpoints import names
from specache_compile.checkpoints.loaded import placed
from specache_compile.checkpoints.names import print_origin, resolved
from specache_compile.errors import SpecacheError


def config_of(name: str, layers: int | None) -> Any:
    """The config of a checkpoint or a config.json, cut to `layers` layers."""
    config = names.config_of(name)
    if layers is not None:
        text = config.get_text_config()
        if not 1 <= layers <= text.num_hidden_layers:
            raise SpecacheError(f"--layers {layers}: the model has {text.num_hidden_layers} layers; give at most that")
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    return config


def is_random(name: str, layers: int | None) -> bool:
    """Whether the weights are random: for a config, or a checkpoint with fewer layers."""
    return name.endswith(".json") or layers is not None


def open_model(name: str, layers: int | None, dtype: str, device: str) -> Any:
    """The model on its device, in `dtype`, for inference."""
    if is_random(name, layers):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(name, layers), dtype=dtype)
        return placed(model.eval(), device)
    print_origin(name)
    return placed(AutoModelForCausalLM.from_pretrained(resolved(name), dtype=dtype), device)


def check_room(
    config: Any, contexts: list[int], steps: int, batches: list[int], runners: int, dtype: torch.dtype, device: str
) -> None:
    """Check the context and the memory before weights are loaded.

    SpecacheError if a context and its steps exceed the model's context, or if the weights and a cache for each runner
    exceed the free memory.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or 1 << 62
    if max(contexts) + steps > limit:
        raise SpecacheError(f"--contexts {max(contexts)}: the model has {limit:,} tokens, and {steps} steps follow")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights = sum(p.nbytes for p in model.parameters())
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    pair = 2 * heads * width * dtype.itemsize * text.num_hidden_layers
    required = weights + (runners + 1) * pair * max(contexts) * max(batches)
    free = torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else psutil.virtual_memory().available
    if required > free:
        raise SpecacheError(
            f"weights of {weights / 1e9:.1f} GB and {runners} caches of {max(contexts):,} tokens × {max(batches)} "
            f"require {required / 1e9:.1f} GB; {free / 1e9:.1f} GB are free: give fewer --methods or shorter --contexts"
        )
