"""The differences between the supported versions of torch and transformers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import Cache
from transformers.generation.utils import GenerationMixin


def release(module: Any) -> tuple[int, ...]:
    """(5, 18) of version 5.18.2."""
    return tuple(int(part) for part in module.__version__.split(".")[:2])


# From 5.18 on `generate` passes no mask where nothing is padded.
GENERATE_MASKS_ALL = release(transformers) < (5, 18)
# From 5.18 on a sliding-window layer shows only its window, but keeps the tokens that later steps may drop.
WINDOWS_TAKE_DRAFTS = release(transformers) >= (5, 18)
# The C++ code of Inductor 2.11 checks an index before computing it, and does not compile.
CHECKS_BOUNDS_TOO_EARLY = release(torch) < (2, 12)
# Name of the cache argument of `forward`, and of the field in its output. `cache` from 5.24 on, which warns for the
# earlier name.
CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)


def model_of(local_scope: Mapping[str, Any]) -> torch.nn.Module | None:
    """The model whose `forward` has these local variables; None if they are another function's.

    From transformers 5.24 on a wrapper that renames arguments stands before `forward`, with the model in `args`.
    """
    model = local_scope.get("self", next(iter(local_scope.get("args", ())), None))
    return model if isinstance(model, torch.nn.Module) else None


def with_cache(cache: Cache | None) -> dict[str, Any]:
    """Return the keyword argument that passes a cache to a model or to `generate`.

    transformers 5.24 names this argument `cache`, earlier versions `past_key_values`.

    Args:
        cache: a cache, or None for a new one.

    Returns:
        A dict with one entry, to unpack in the call.

    Example:
        import specache_compile as sc

        model, tokenizer = sc.load_model("examples/needle-llama")
        model.compile(backend="specache")
        first = tokenizer("Hello", return_tensors="pt").to(model.device)
        output = model.generate(**first, max_new_tokens=4, return_dict_in_generate=True)
        model.generate(output.sequences, **sc.with_cache(sc.cache_of(output)), max_new_tokens=4)  # continues the cache
    """
    return {CACHE: cache}


def cache_of(output: Any) -> Any:
    """Return the cache in an output of a model or of `generate`.

    Args:
        output: what a model returns, or `generate(..., return_dict_in_generate=True)`.

    Returns:
        The cache: `output.cache` from transformers 5.24 on, `output.past_key_values` before.

    Example:
        import specache_compile as sc

        model, tokenizer = sc.load_model("examples/needle-llama")
        model.compile(backend="specache")
        inputs = tokenizer("Hello", return_tensors="pt").to(model.device)
        output = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)
        print(sc.cache_of(output).get_seq_length())
    """
    return getattr(output, CACHE)
