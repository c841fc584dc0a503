"""Make `generate` draft with the compressed cache and verify with the exact pass (option verify).

Where greedy and sampled generation begin, `GenerationMixin._sample`, a model that was compiled with the option goes to
Hugging Face's own loop of assisted decoding instead. The candidates that the loop verifies come from the same model, on
the same cache: the decode phase drafts them, and a crop takes them back. Whatever else a model compiled with the option
computes is exact (`Session.phases`), so that what is not drafted is slow, and never wrong.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import (
    CandidateGenerator,
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.utils import GenerationMixin

from .compat import WINDOWS_TAKE_DRAFTS, missing_for_drafts
from .compiled_options import options_of
from .errors import SpecacheWarning, not_drafted
from .methods import parse_options
from .runtime.draft_length import DraftLength
from .runtime.ranks import everyones
from .runtime.records import find_record
from .runtime.session import Session, session_of

# Criteria that do not go by what the last token is, and the one that Hugging Face's loop applies to each token.
HANDLED = (MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria)


def route_verification() -> None:
    """Extend `GenerationMixin._sample`, once for the process, where transformers has all that is needed; where not, the
    backend refuses the option."""
    original: Any = GenerationMixin._sample
    if getattr(original, "routes_verification", False) or missing_for_drafts() is not None:
        return

    @functools.wraps(original)
    def sample(
        self: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kw: Any
    ) -> Any:
        given = (input_ids, logits_processor, stopping_criteria, generation_config)
        if not is_to_verify(self):
            return original(self, *given, **kw)
        reason = reason_not_to_draft(self, *given, kw)
        if reason is None:
            return verified(self, *given, **kw)
        warnings.warn(not_drafted(reason), SpecacheWarning, stacklevel=3)
        return original(self, *given, **kw)

    sample.routes_verification = True  # type: ignore[attr-defined]
    GenerationMixin._sample = sample  # type: ignore[method-assign, assignment]


def is_to_verify(model: torch.nn.Module) -> bool:
    """Whether the model's calls are compiled by this backend, with the option."""
    options = options_of(model)
    return bool(options) and parse_options(options).verify is not None


def reason_not_to_draft(
    model: Any, input_ids: Tensor, processors: Any, criteria: Any, config: Any, kwargs: Mapping[str, Any]
) -> str | None:
    """Why a generation goes on without drafts, each step exact; None where it is drafted."""
    others = [type(c).__name__ for c in criteria if not isinstance(c, HANDLED)]
    cache = kwargs.get("past_key_values")
    if input_ids.shape[0] > 1:
        return f"assisted decoding takes a batch of one, and this is {input_ids.shape[0]}"
    if not isinstance(cache, DynamicCache) or not kwargs.get("use_cache"):
        return "it has no DynamicCache"
    kept = (DynamicLayer, DynamicSlidingWindowLayer) if WINDOWS_TAKE_DRAFTS else (DynamicLayer,)
    forgetful = next((type(layer).__name__ for layer in cache.layers if type(layer) not in kept), None)
    if forgetful is not None or model._is_stateful:
        return f"a {forgetful or type(model).__name__} of this transformers cannot take back what was drafted"
    if config.is_assistant:
        return "it drafts for another model itself"
    if any(isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in processors):
        return "guidance_scale runs the model on a cache of its own, in the order of the tokens"
    if config.do_sample and others:
        return f"beside sampling, {others[0]} could only stop it a token late"
    return None


def verified(
    model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kwargs: Any
) -> Any:
    """Hugging Face's loop of assisted decoding, with drafts of the model's own. Interrupted, it leaves the cache with
    the exact pairs of the tokens that were said."""
    drafts = Drafts(model, logits_processor, stopping_criteria, generation_config)
    itself = Verifier(model, drafts)
    try:
        return type(model)._assisted_decoding(
            itself, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs
        )
    except BaseException:
        drafts.take_back()
        raise


class Verifier:
    """Stands for the model in the loop: its prefill is that of `generate`, which goes on from a filled cache and takes
    a long prompt in chunks, and its candidates are its own drafts."""

    def __init__(self, model: Any, drafts: Drafts) -> None:
        self.model, self.drafts = model, drafts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def _get_candidate_generator(self, **given: Any) -> Drafts:
        return self.drafts

    def prepare_inputs_for_generation(self, input_ids: Tensor, is_first_iteration: bool = False, **kwargs: Any) -> Any:
        if is_first_iteration:
            kwargs.pop("next_sequence_length", None)  # the prefill finds it itself
            return {"to_prefill": (input_ids, kwargs)}
        return self.model.prepare_inputs_for_generation(input_ids, is_first_iteration=False, **kwargs)

    def __call__(self, **inputs: Any) -> Any:
        if "to_prefill" in inputs:
            input_ids, kwargs = inputs["to_prefill"]
            return self.model._prefill(input_ids, self.drafts.config, kwargs, is_first_iteration=True)
        return self.model(**inputs, return_dict=True)  # as drafts are called, whose graph serves a lone token


class Drafts(CandidateGenerator):
    """Candidates for the loop: the decode phase's tokens after those said so far, and what it would choose from."""

    requires_model_outputs = True  # and with them, the model's arguments as they stand

    def __init__(self, model: Any, processors: Any, criteria: Any, config: Any) -> None:
        self.model, self.processors, self.config = model, processors, config
        self.others = [c for c in criteria if not isinstance(c, HANDLED)]
        # What the loop puts over the model's arguments.
        self.model_kwargs_overrides: dict[str, Any] = {}
        self.cache: DynamicCache | None = None
        # Cached tokens that were said, of which an interruption leaves the cache with no more.
        self.said = 0
        # Of the round under way: its session, when it began, graphs compiled before it, and the tokens drafted.
        self.session: Session | None = None
        self.start, self.compiles, self.drafted = 0.0, 0, 0

    def get_candidates(self, input_ids: Tensor, **given: Any) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """input_ids [1, n], of which the cache lacks the last; returns [1, n + γ], and the drafted tokens' processed
        logits [1, γ, V], None without a draft. γ may be 0."""
        kwargs = given["model_kwargs"]
        self.cache = kwargs["past_key_values"]
        self.said = self.cache.get_seq_length()
        self.start, self.compiles, self.drafted = time.perf_counter(), self.compiled(), 0
        self.model_kwargs_overrides = {}
        self.session = None if given["is_first_iteration"] else session_of(self.cache)
        if self.session is None or self.session.options.verify is None:
            self.session = None
            return input_ids, None
        length = self.session.draft_length = self.session.draft_length or DraftLength(self.session.options.verify)
        tokens = everyones(self.session.ranks, length.next())[0]  # by the clock, of which each rank has its own
        ids, logits = self.draft(input_ids, kwargs, min(tokens, self.config.max_length - input_ids.shape[1] - 1))
        self.drafted = len(logits)
        if not logits:
            return input_ids, None
        if "logits_to_keep" in kwargs:
            self.model_kwargs_overrides = {"logits_to_keep": 0}  # all: a number for each γ would be a graph for each
        return ids, torch.stack(logits, 1)

    def draft(self, ids: Tensor, kwargs: Mapping[str, Any], tokens: int) -> tuple[Tensor, list[Tensor]]:
        """At most so many tokens of the decode phase; afterwards the cache is as it was."""
        assert self.session is not None
        kwargs, drafted = dict(kwargs), []
        self.session.drafting = True
        try:
            for _ in range(tokens):
                inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)
                outputs = self.model(**inputs, return_dict=True)
                kwargs = self.model._update_model_kwargs_for_generation(outputs, kwargs)
                logits = self.processors(ids, outputs.logits[:, -1].to(ids.device, torch.float32, copy=True))
                longer = torch.cat([ids, self.choose(logits)], 1)
                stops = self.stops(longer)
                # A greedy draft leaves what stops to the exact pass, whose last token the loop's criteria see. A
                # sampled one may not choose what it drafts by what was drawn: it would no longer be the distribution.
                if stops and not self.config.do_sample:
                    break
                ids = longer
                drafted.append(logits)
                if stops:
                    break
        finally:
            self.session.drafting = False
            self.take_back()
        return ids, drafted

    def choose(self, logits: Tensor) -> Tensor:
        """The next token [1, 1] from processed logits [1, V], as `generate` chooses it."""
        if self.config.do_sample:
            return torch.multinomial(logits.softmax(-1), num_samples=1)
        return logits.argmax(-1, keepdim=True)

    def stops(self, ids: Tensor) -> bool:
        """Whether the last token ends the generation, the number of tokens apart."""
        ends = getattr(self.config, "_eos_token_tensor", None)
        if ends is not None and bool(torch.isin(ids[0, -1], ends.to(ids.device))):
            return True
        return any(bool(criterion(ids, None).any()) for criterion in self.others)

    def take_back(self) -> None:
        """Crop the cache to the tokens that were said, where a round is under way."""
        if self.session is None or self.cache is None:
            return
        more = self.cache.get_seq_length() - self.said
        if more > 0:
            self.cache.crop(-more)

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: Any) -> None:
        """After a verification that confirmed `num_matches` of the drafted tokens."""
        if self.session is None or self.session.draft_length is None:
            return
        accepted = min(int(num_matches), self.drafted)
        seconds = time.perf_counter() - self.start
        self.session.statistics.verified.note(self.drafted, accepted, self.session.host_bytes(self.said))
        self.session.draft_length.note(self.drafted, accepted, seconds if self.compiled() == self.compiles else None)

    def compiled(self) -> int:
        """Graphs of the model that were rewritten so far."""
        record = find_record(self.model)
        return 0 if record is None else sum(len(graph.rewrites.made) for graph in record.graphs)
