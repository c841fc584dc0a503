"""What differs between the versions of torch and transformers that are supported."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers import Cache
from transformers.generation.utils import GenerationMixin

from specache_compile.errors import SpecacheError


def release(module: Any) -> tuple[int, ...]:
    """(5, 18) of version 5.18.2."""
    return tuple(int(part) for part in module.__version__.split(".")[:2])


# From 5.18 on `generate` gives the model no mask where nothing is padded.
GENERATE_MASKS_ALL = release(transformers) < (5, 18)
# From 5.18 on a sliding-window layer shows no more than its window while it keeps what several steps may take back.
WINDOWS_TAKE_DRAFTS = release(transformers) >= (5, 18)
# The C++ that Inductor 2.11 writes checks an index before it has computed it, and does not compile.
CHECKS_BOUNDS_TOO_EARLY = release(torch) < (2, 12)
# Forward's cache argument, and the field of its output: `cache` from 5.24 on, where the former name warns. None where
# transformers has neither.
CACHE = next(
    (
        name
        for name in ("cache", "past_key_values")
        if name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    ),
    None,
)
# What drafting (`verify.py`) calls or stands in for, and the arguments that it must take.
GENERATION = {
    "_sample": ("input_ids", "logits_processor", "stopping_criteria", "generation_config"),
    "_assisted_decoding": ("input_ids", "logits_processor", "stopping_criteria", "generation_config"),
    "_prefill": ("input_ids", "generation_config", "model_kwargs", "is_first_iteration"),
    "prepare_inputs_for_generation": ("input_ids", "next_sequence_length", "is_first_iteration"),
    "_get_candidate_generator": ("generation_config", "logits_processor"),
    "_update_model_kwargs_for_generation": ("outputs", "model_kwargs"),
}


def with_cache(cache: Cache | None) -> dict[str, Any]:
    """The keyword argument that passes a cache to a model or to `generate`, under this version's name.

    `model(tokens, **with_cache(cache))` runs without a warning on every supported transformers.
    """
    return {cache_name(): cache}


def cache_of(output: Any) -> Any:
    """The cache in the output of a model or of `generate(..., return_dict_in_generate=True)`."""
    return getattr(output, cache_name())


def cache_name() -> str:
    """`cache` or `past_key_values`. SpecacheError where transformers has neither."""
    if CACHE is None:
        raise SpecacheError(
            f"transformers {transformers.__version__} takes its cache under a name that specache does not know: "
            "install a version from 5.17 to 5.24"
        )
    return CACHE


def missing_for_drafts() -> str | None:
    """What of that this version of transformers has not, or has with other arguments."""
    from transformers.generation import CandidateGenerator

    here = f"in transformers {transformers.__version__}"
    for name, wanted in GENERATION.items():
        method = getattr(GenerationMixin, name, None)
        if method is None or not set(wanted) <= set(inspect.signature(method).parameters):
            return f"GenerationMixin.{name}({', '.join(wanted)}) {here}"
    if CACHE is None:
        return f"cache argument of GenerationMixin.prepare_inputs_for_generation {here}"
    return None if hasattr(CandidateGenerator, "requires_model_outputs") else f"requires_model_outputs {here}"
