"""Drafts by prompt lookup, as in Hugging Face (option lookup): the tokens that followed an earlier occurrence of the
last few tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation import PromptLookupCandidateGenerator

from specache_compile.options import MethodOptions

from .drafts import Drafts

# Tokens of a draft. With the last output token they are the lanes of one decode; a CUDA kernel has at most 16.
DRAFTED = 10
# Most last tokens to look up; fewer are tried down to one.
NGRAM = 3


class LookedUp(Drafts):
    """Candidates for the loop that need no step of the model."""

    def serves(self, options: MethodOptions) -> bool:
        return options.lookup

    def length(self) -> int:
        return DRAFTED

    def draft(self, ids: Tensor, kwargs: Mapping[str, Any], tokens: int) -> tuple[Tensor, Tensor | None]:
        """Append at most `tokens` tokens to ids [1, n], none of which stops the generation.

        Without logits: sampling accepts a token if the model itself would sample it.
        """
        found = looked_up(ids, getattr(self.config, "_eos_token_tensor", None), tokens, self.config.max_length)
        first = ids.shape[1] + 1
        stops = (place for place in range(first, found.shape[1] + 1) if self.others and self.stops(found[:, :place]))
        return found[:, : next(stops, found.shape[1] + 1) - 1], None


def looked_up(ids: Tensor, ends: Tensor | None, tokens: int, longest: int) -> Tensor:
    """Append at most `tokens` tokens to ids [1, n], up to `longest` in all; none of them is in `ends`."""
    looks = PromptLookupCandidateGenerator(
        eos_token_id=None if ends is None else ends.to(ids.device), num_output_tokens=tokens,
        max_matching_ngram_size=NGRAM, max_length=longest,
    )  # fmt: skip
    found, _ = looks.get_candidates(cast("torch.LongTensor", ids))
    return found
