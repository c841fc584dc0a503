"""Drafts with the compressed cache and verifies with the exact pass, inside `generate` (option verify).

`GenerationMixin._sample`, for greedy and sampled generation, calls Hugging Face's loop of assisted decoding. Its
candidates come from the same model and cache: the decode phase drafts them, and a crop drops them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.utils import GenerationMixin

from specache_compile.compat import CACHE, WINDOWS_TAKE_DRAFTS
from specache_compile.compile.compiled_options import options_of
from specache_compile.errors import SpecacheError
from specache_compile.methods import parse_options

from .drafts import HANDLED, Drafts, warn_not_drafted


def route_verification() -> None:
    """Wrap `GenerationMixin._sample` and `_beam_search`, once in the process."""
    original: Any = GenerationMixin._sample
    if getattr(original, "routes_verification", False):
        return

    @functools.wraps(original)
    def sample(
        self: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kw: Any
    ) -> Any:
        given = (input_ids, logits_processor, stopping_criteria, generation_config)
        if not is_drafting(self):
            return original(self, *given, **kw)
        reason = reason_not_to_draft(self, *given, kw)
        if reason is None:
            return verified(Drafts(self, logits_processor, stopping_criteria, generation_config), *given, **kw)
        warn_not_drafted(self, reason)
        return original(self, *given, **kw)

    beam_search = GenerationMixin._beam_search

    @functools.wraps(beam_search)
    def search(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_drafting(self):
            warn_not_drafted(self, "assisted decoding generates one sequence, and a beam search several")
        return beam_search(self, *args, **kwargs)

    sample.routes_verification = True  # type: ignore[attr-defined]
    GenerationMixin._sample = sample  # type: ignore[method-assign, assignment]
    GenerationMixin._beam_search = search  # type: ignore[method-assign, assignment]


def is_drafting(model: torch.nn.Module) -> bool:
    """Whether the options of the model's compiled calls draft; False for another backend."""
    given = options_of(model)
    return bool(given) and parse_options(given).drafts


def reason_not_to_draft(
    model: Any, input_ids: Tensor, processors: Any, criteria: Any, config: Any, kwargs: Mapping[str, Any]
) -> str | None:
    """Why a generation is not drafted, so that each step is exact; None if it is."""
    others = [type(c).__name__ for c in criteria if not isinstance(c, HANDLED)]
    cache = kwargs.get(CACHE)
    if input_ids.shape[0] > 1:
        return f"assisted decoding requires a batch of one, and this batch has {input_ids.shape[0]}"
    if not isinstance(cache, DynamicCache) or not kwargs.get("use_cache"):
        return "its cache is no DynamicCache"
    check_windows(cache)
    if (reason := forgetful(model, cache)) is not None:
        return reason
    if config.is_assistant:
        return "this model drafts for another model"
    if any(isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in processors):
        return "guidance_scale runs the model on a second cache, token by token"
    if config.do_sample and others:
        return f"with sampling, {others[0]} would stop it one token late"
    return None


def forgetful(model: Any, cache: DynamicCache) -> str | None:
    """Why a cache cannot drop rejected tokens; None if it can."""
    able = (DynamicLayer, DynamicSlidingWindowLayer) if WINDOWS_TAKE_DRAFTS else (DynamicLayer,)
    name = next((type(layer).__name__ for layer in cache.layers if type(layer) not in able), None)
    if name is None and not model._is_stateful:
        return None
    return f"in this version of transformers a {name or type(model).__name__} cannot drop rejected tokens"


def check_windows(cache: DynamicCache) -> None:
    """SpecacheError if drafts on a cache with sliding windows require a newer version of transformers."""
    if not WINDOWS_TAKE_DRAFTS and any(type(layer) is DynamicSlidingWindowLayer for layer in cache.layers):
        raise SpecacheError(
            f"option verify: a DynamicSlidingWindowLayer of transformers {transformers.__version__} cannot "
            "drop rejected tokens. Install transformers 5.18 or newer, or leave the option out"
        )


def verified(
    drafts: Drafts, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, config: Any, **kwargs: Any
) -> Any:
    """Hugging Face's loop of assisted decoding with these drafts. After an interruption the cache has only the output's
    tokens."""
    itself = Verifier(drafts.model, drafts)
    try:
        return type(drafts.model)._assisted_decoding(
            itself, input_ids, logits_processor, stopping_criteria, config, **kwargs
        )
    except BaseException:
        drafts.crop_drafts()
        raise


class Verifier:
    """Replaces the model in the loop. It prefills like `generate`, which continues a filled cache and splits long
    prompts into chunks; its candidates are its own drafts."""

    def __init__(self, model: Any, drafts: Drafts) -> None:
        self.model, self.drafts = model, drafts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def _get_candidate_generator(self, **given: Any) -> Drafts:
        return self.drafts

    def prepare_inputs_for_generation(self, input_ids: Tensor, is_first_iteration: bool = False, **kwargs: Any) -> Any:
        if is_first_iteration:
            kwargs.pop("next_sequence_length", None)  # the prefill computes it
            return {"to_prefill": (input_ids, kwargs)}
        return self.model.prepare_inputs_for_generation(input_ids, is_first_iteration=False, **kwargs)

    def __call__(self, **inputs: Any) -> Any:
        if "to_prefill" in inputs:
            input_ids, kwargs = inputs["to_prefill"]
            return self.model._prefill(input_ids, self.drafts.config, kwargs, is_first_iteration=True)
        return self.model(**inputs, return_dict=True)  # as in drafts, so that a single token uses the same graph
