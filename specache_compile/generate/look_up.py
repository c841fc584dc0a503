"""Drafts that are looked up (option lookup): what followed the last few tokens where they stood before, in the
prompt or in what was said since (prompt lookup, as Hugging Face has it)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation import PromptLookupCandidateGenerator

from specache_compile.options import MethodOptions
from specache_compile.runtime.session import Session

from .drafts import Drafts

# Tokens of a draft. With the last token said they are the lanes of one decode, of which a CUDA kernel has 16 at most.
DRAFTED = 10
# Last tokens that must have stood before: as many as possible, from so many down to one.
NGRAM = 3


class LookedUp(Drafts):
    """Candidates for the loop that cost no step of the model."""

    def serves(self, options: MethodOptions) -> bool:
        return options.lookup

    def length(self) -> int:
        return DRAFTED

    def draft(self, ids: Tensor, kwargs: Mapping[str, Any], tokens: int) -> tuple[Tensor, Tensor | None]:
        """ids [1, n] with at most so many tokens behind them, the first of which stops nothing. No logits: each is
        certain, and sampling accepts it by what the model itself would draw."""
        ends = getattr(self.config, "_eos_token_tensor", None)
        looks = PromptLookupCandidateGenerator(
            eos_token_id=None if ends is None else ends.to(ids.device), num_output_tokens=tokens,
            max_matching_ngram_size=NGRAM, max_length=self.config.max_length,
        )  # fmt: skip
        found, _ = looks.get_candidates(cast("torch.LongTensor", ids))
        first = ids.shape[1] + 1
        stops = (place for place in range(first, found.shape[1] + 1) if self.others and self.stops(found[:, :place]))
        return found[:, : next(stops, found.shape[1] + 1) - 1], None

    def note(self, session: Session, accepted: int, seconds: float) -> None:
        """What a round has shown: it read the tiers, as any decode does."""
        session.statistics.verified.note(self.drafted, accepted, session.tiers.host_bytes(self.said), streamed=0)
