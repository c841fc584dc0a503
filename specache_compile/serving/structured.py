"""Answers with a grammar: llguidance computes the allowed next tokens."""

from __future__ import annotations

from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.torch import fill_next_token_bitmask
from torch import Tensor
from transformers import LogitsProcessor

# JSON without optional spaces, which a model could generate without end.
COMPACT = {"whitespace_flexible": False}
# The spaces in the calls that models are trained on: those of json.dumps.
SPACED = {**COMPACT, "item_separator": ", ", "key_separator": ": "}


def of_schema(schema: dict[str, Any]) -> str:
    """The grammar of a JSON schema."""
    compact: dict[str, Any] = {"x-guidance": COMPACT, **schema}
    return str(LLMatcher.grammar_from_json_schema(compact))


def matcher_of(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """The matcher of a grammar. ValueError where llguidance does not support it."""
    matcher = LLMatcher(tokenizer, grammar)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


class Constraint(LogitsProcessor):
    """Allows only the tokens of the grammar.

    prompt: number of tokens before the answer.
    words: 32-bit words in a mask of all tokens.
    read: number of tokens of the answer that the matcher has read.
    """

    def __init__(self, matcher: LLMatcher, prompt: int, words: int) -> None:
        self.matcher, self.prompt, self.words, self.read = matcher, prompt, words, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        tokens = input_ids[0, self.prompt + self.read :].tolist()
        self.matcher.consume_tokens(tokens)
        self.read += len(tokens)
        size = scores.shape[-1]
        mask = torch.zeros(1, self.words, dtype=torch.int32)
        fill_next_token_bitmask(self.matcher, mask)
        if self.matcher.is_error():
            raise RuntimeError(f"llguidance: {self.matcher.get_error()}")
        allowed = (mask[0, :, None] >> torch.arange(32, dtype=torch.int32) & 1).flatten().bool()
        allowed = torch.nn.functional.pad(allowed, (0, max(0, size - len(allowed))))[:size]
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)
