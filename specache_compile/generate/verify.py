"""Drafts with the compressed cache and verifies with the exact pass, inside `generate` (option verify).

`GenerationMixin._sample`, for greedy and sampled generation, calls Hugging Face's loop of assisted decoding. Its
candidates come from the same model and cache: the decode phase drafts them, and a crop drops them.
"""

from __future__ import annotations

import functools
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

from specache_compile.compat import CACHE, WINDOWS_TAKE_DRAFTS
from specache_compile.compile.compiled_options import options_of
from specache_compile.methods import parse_options
from specache_compile.runtime.records import record_of
from specache_compile.runtime.session import Session, session_of, sessions_of

# Criteria that do not depend on the last token, and the one that Hugging Face's loop applies to each token.
HANDLED = (MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria)
# Tokens of a first draft with "auto", and of the longest.
FIRST, MOST = 8, 64


@functools.cache
def route_verification() -> None:
    """Wrap `GenerationMixin._sample` and `_beam_search`, once in the process."""
    original: Any = GenerationMixin._sample

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
    able = (DynamicLayer, DynamicSlidingWindowLayer) if WINDOWS_TAKE_DRAFTS else (DynamicLayer,)
    unable = [type(layer).__name__ for layer in cache.layers if type(layer) not in able]
    if unable or model._is_stateful:
        return f"in this version of transformers a {[*unable, type(model).__name__][0]} cannot drop rejected tokens"
    if config.is_assistant:
        return "this model drafts for another model"
    if any(isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in processors):
        return "guidance_scale runs the model on a second cache, token by token"
    if config.do_sample and others:
        return f"with sampling, {others[0]} would stop it one token late"
    return None


def warn_not_drafted(model: torch.nn.Module, reason: str) -> None:
    """Warn, once for a model and reason, that a generation drafts nothing."""
    record_of([*model.parameters()]).warn_once(
        f"option verify: this generation is not drafted: {reason}. Its tokens are those of the full cache, and every "
        "step streams the host tier. Leave verify out for such calls"
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


class Drafts(CandidateGenerator):
    """Candidates for Hugging Face's loop: the decode phase's next tokens, and the logits that chose them.

    model_kwargs_overrides: the loop replaces the model's arguments by these.
    confirmed: the cached tokens that belong to the output. After an interruption the cache keeps only these.
    session, drafted: of the current round, and the number of its drafted tokens.
    auto: the length of the next draft with "auto".
    """

    requires_model_outputs = True  # the loop then passes the model's current arguments

    def __init__(self, model: Any, processors: Any, criteria: Any, config: Any) -> None:
        self.model, self.processors, self.config = model, processors, config
        self.others = [c for c in criteria if not isinstance(c, HANDLED)]
        self.model_kwargs_overrides: dict[str, Any] = {}
        self.cache: DynamicCache | None = None
        self.session: Session | None = None
        self.confirmed = self.drafted = 0
        self.auto = FIRST

    def get_candidates(self, input_ids: Tensor, **given: Any) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """Draft γ tokens; γ may be 0.

        input_ids [1, n]; the cache lacks the last of them. Returns [1, n + γ], and the drafted tokens' processed logits
        [1, γ, V], None without a draft.
        """
        kwargs = given["model_kwargs"]
        self.cache = kwargs[CACHE]
        self.confirmed, self.drafted = self.cache.get_seq_length(), 0
        self.model_kwargs_overrides = {}
        self.session = None if given["is_first_iteration"] else session_of(self.cache)
        if self.session is None or not self.session.options.drafts or self.is_parted():
            self.session = None
            return input_ids, None
        room = self.config.max_length - input_ids.shape[1] - 1
        fixed = self.session.options.verify
        ids, logits = self.draft(input_ids, kwargs, min(fixed if isinstance(fixed, int) else self.auto, room))
        if self.is_parted():  # by the draft's own steps, which were exact then
            self.session = None
            return input_ids, None
        self.drafted = ids.shape[1] - input_ids.shape[1]
        if self.drafted and "logits_to_keep" in kwargs:
            # 0 means all; a number would compile a graph for each γ
            self.model_kwargs_overrides = {"logits_to_keep": 0}
        return ids, logits

    def is_parted(self) -> bool:
        """Whether several sessions share the cache; a draft would mark only one of them. Warns if so."""
        parted = sessions_of(self.cache) != [self.session]
        if parted:
            warn_not_drafted(
                self.model, "a graph break in the model splits its cache into parts, each with its own step"
            )
        return parted

    def draft(self, ids: Tensor, kwargs: Mapping[str, Any], tokens: int) -> tuple[Tensor, Tensor | None]:
        """Append at most `tokens` tokens of the decode phase to ids [1, n]. Returns the same as `get_candidates`; the
        cache is unchanged afterwards."""
        assert self.session is not None
        kwargs, drafted = dict(kwargs), []
        try:
            for _ in range(tokens):
                inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)
                with self.session.drafting_steps():
                    outputs = self.model(**inputs, return_dict=True)
                kwargs = self.model._update_model_kwargs_for_generation(outputs, kwargs)
                logits = self.processors(ids, outputs.logits[:, -1].to(ids.device, torch.float32, copy=True))
                longer = torch.cat([ids, self.choose(logits)], 1)
                stops = self.stops(longer)
                # A greedy draft leaves the stop token to the exact pass, so that the loop's criteria see it last. A
                # sampled draft must keep it: dropping sampled tokens would change the distribution.
                if stops and not self.config.do_sample:
                    break
                ids = longer
                drafted.append(logits)
                if stops:
                    break
        finally:
            self.crop_drafts()
        return ids, torch.stack(drafted, 1) if drafted else None

    def choose(self, logits: Tensor) -> Tensor:
        """The next token [1, 1] from processed logits [1, V], chosen as in `generate`."""
        if self.config.do_sample:
            return torch.multinomial(logits.softmax(-1), num_samples=1)
        return logits.argmax(-1, keepdim=True)

    def stops(self, ids: Tensor) -> bool:
        """Whether the last token ends the generation, apart from its length."""
        ends = getattr(self.config, "_eos_token_tensor", None)
        if ends is not None and bool(torch.isin(ids[0, -1], ends.to(ids.device))):
            return True
        return any(bool(criterion(ids, None).any()) for criterion in self.others)

    def crop_drafts(self) -> None:
        """During a round, crop the cache to the output's tokens."""
        if self.session is None or self.cache is None:
            return
        more = self.cache.get_seq_length() - self.confirmed
        if more > 0:
            self.cache.crop(-more)

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: Any) -> None:
        """Record a verification that accepted `num_matches` of the drafted tokens. "auto" then drafts two tokens more
        if all were accepted, else one less (the heuristic schedule of transformers)."""
        if self.session is None:
            return
        accepted, counts = min(int(num_matches), self.drafted), self.session.statistics
        counts.rounds += 1
        counts.drafted += self.drafted
        counts.accepted += accepted
        if self.drafted:
            self.auto = min(self.auto + 2, MOST) if accepted == self.drafted else max(self.auto - 1, 1)
