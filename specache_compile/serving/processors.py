"""The processors of logits for fields that `generate` has no setting for."""

from __future__ import annotations

import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor
from transformers import LogitsProcessor


class Constraint(LogitsProcessor):
    """Allows only the tokens of a grammar, as llguidance computes them. ValueError if it does not support the grammar.

    prompt: number of tokens before the answer.
    read: number of tokens of the answer that the matcher has read.
    """

    def __init__(self, tokenizer: LLTokenizer, grammar: str, prompt: int) -> None:
        self.matcher, self.prompt, self.read = LLMatcher(tokenizer, grammar), prompt, 0
        if self.matcher.is_error():
            raise ValueError(self.matcher.get_error())

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        tokens = input_ids[0, self.prompt + self.read :].tolist()
        self.matcher.consume_tokens(tokens)
        self.read += len(tokens)
        bias = self.matcher.compute_logit_bias()  # an error leaves a mask of the end alone
        if self.matcher.is_error():
            raise RuntimeError(f"llguidance: {self.matcher.get_error()}")
        allowed = torch.frombuffer(bytearray(bias), dtype=torch.uint8)
        allowed = torch.nn.functional.pad(allowed.bool(), (0, scores.shape[-1] - len(allowed)))
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)


class Penalties(LogitsProcessor):
    """OpenAI's frequency penalty, for each occurrence of a generated token, and presence penalty, once for each
    generated token. Prompt tokens do not count."""

    def __init__(self, frequency: float, presence: float, prompt: int) -> None:
        self.frequency, self.presence, self.prompt = frequency, presence, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        generated = input_ids[:, self.prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)
