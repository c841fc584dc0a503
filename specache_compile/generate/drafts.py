"""Drafts by the model itself (option verify): the next tokens of its decode phase, over the compressed cache."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.generation import CandidateGenerator, EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from specache_compile.compat import CACHE
from specache_compile.runtime.draft_length import DraftLength
from specache_compile.runtime.ranks import gather
from specache_compile.runtime.records import find_record, record_of
from specache_compile.runtime.session import Session, sessions_of

# Criteria that do not depend on the last token, and the one that Hugging Face's loop applies to each token.
HANDLED = (MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria)
IN_PARTS = "a graph break in the model splits its cache into parts, each with its own step"


class Drafts(CandidateGenerator):
    """Candidates for Hugging Face's loop: the decode phase's next tokens, and the logits that chose them."""

    requires_model_outputs = True  # the loop then passes the model's current arguments

    def __init__(self, model: Any, processors: Any, criteria: Any, config: Any) -> None:
        self.model, self.processors, self.config = model, processors, config
        self.others = [c for c in criteria if not isinstance(c, HANDLED)]
        # The loop replaces the model's arguments by these.
        self.model_kwargs_overrides: dict[str, Any] = {}
        self.cache: DynamicCache | None = None
        # The cached tokens that belong to the output. After an interruption the cache keeps only these.
        self.confirmed = 0
        # The current round: its session, its start, the graphs compiled before it, and the number of drafted tokens.
        self.session: Session | None = None
        self.start, self.compiles, self.drafted = 0.0, 0, 0
        self.parted = False

    def get_candidates(self, input_ids: Tensor, **given: Any) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """Draft γ tokens; γ may be 0.

        input_ids [1, n]; the cache lacks the last of them. Returns [1, n + γ], and the drafted tokens' processed logits
        [1, γ, V], None without a draft.
        """
        kwargs = given["model_kwargs"]
        self.cache = kwargs[CACHE]
        self.confirmed = self.cache.get_seq_length()
        self.start, self.compiles, self.drafted = time.perf_counter(), rewritten_so_far(self.model), 0
        self.model_kwargs_overrides = {}
        self.session = None if given["is_first_iteration"] else next(iter(sessions_of(self.cache)), None)
        if self.session is None or not self.session.options.drafts or self.is_parted():
            self.session = None
            return input_ids, None
        room = self.config.max_length - input_ids.shape[1] - 1
        ids, logits = self.draft(input_ids, kwargs, min(draft_length_of(self.session), room))
        if self.is_parted():  # by the draft's own steps, which were exact then
            self.session = None
            return input_ids, None
        self.drafted = ids.shape[1] - input_ids.shape[1]
        if self.drafted and "logits_to_keep" in kwargs:
            # 0 means all; a number would compile a graph for each γ
            self.model_kwargs_overrides = {"logits_to_keep": 0}
        return ids, logits

    def is_parted(self) -> bool:
        """Whether several sessions share or shared the cache; a draft would mark only one of them. Warns if so."""
        if not self.parted and sessions_of(self.cache) != [self.session]:
            self.parted = True
            warn_not_drafted(self.model, IN_PARTS)
        return self.parted

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
        """Record a verification that accepted `num_matches` of the drafted tokens."""
        if self.session is not None:
            compiled = rewritten_so_far(self.model) != self.compiles
            seconds = None if compiled else time.perf_counter() - self.start
            accepted = min(int(num_matches), self.drafted)
            note_draft(self.session, self.drafted, accepted, seconds)


def note_draft(session: Session, drafted: int, accepted: int, seconds: float | None) -> None:
    """Record a row's round.

    seconds: None if the round compiled, or if its time is recorded with another row.
    """
    session.statistics.verified.note(drafted, accepted)
    if session.draft_length is not None and drafted:
        session.draft_length.note(drafted, accepted, seconds)


def draft_length_of(session: Session) -> int:
    """Tokens that the decode phase drafts in a session's next round."""
    verify = session.options.verify
    assert verify is not None
    session.draft_length = session.draft_length or DraftLength(verify)
    return gather(session.tiers.ranks, session.draft_length.next())[0]  # each rank measures its own time


def rewritten_so_far(model: Any) -> int:
    """Number of rewritten graphs of a model."""
    record = find_record(model)
    return 0 if record is None else sum(len(graph.rewrites.made) for graph in record.graphs)


def warn_not_drafted(model: torch.nn.Module, reason: str) -> None:
    """Warn, once for a model and reason, that a generation drafts nothing."""
    record_of([*model.parameters()]).warn_once(
        f"option verify: this generation is not drafted: {reason}. Its tokens are those of the full cache, and every "
        "step streams the host tier. Leave verify out for such calls"
    )
