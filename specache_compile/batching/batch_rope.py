"""Requests of models in which a token's result depends on other tokens of the call (`rope_switch.py`)."""

from __future__ import annotations

from typing import Any

from transformers.generation.utils import GenerationMixin

from specache_compile.errors import SpecacheError
from specache_compile.rope_switch import rope_switch

from .request import Request


class BatchRope:
    """The prefills that a model's RoPE, or its indexer, requires.

    A text beyond the RoPE switch is prefilled in one call, like in `generate`. A request that crosses the switch is
    prefilled again there if the model's `generate` does so (Phi-3); else it never joins other rows. An indexer selects
    among the tokens of a call, so it always requires one call.
    """

    def __init__(self, model: Any) -> None:
        text = model.config.get_text_config()
        self.switch = rope_switch(model.config)
        self.indexed = hasattr(text, "index_topk")
        own = type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
        self.prefills_again = own and hasattr(text, "original_max_position_embeddings")

    def prepare(self, request: Request) -> None:
        """Set how a request is prefilled. SpecacheError if its tokens would differ from those of `generate`."""
        request.whole = self.needs_whole_prefill(request)
        if self.switch is None:
            return
        prompt, new = len(request.prompt), int(request.config.max_new_tokens or 0)
        beyond, crosses = prompt + new > self.switch.tokens, prompt <= self.switch.tokens < prompt + new
        if beyond and self.switch.grows:
            raise SpecacheError(
                f"a request of {prompt:,} prompt and {new:,} new tokens: beyond {self.switch.tokens:,} tokens this "
                f"model's RoPE ({self.switch.kind}) depends on the length of a call, which a batch cannot reproduce. "
                "Lower max_new_tokens, or call model.generate"
            )
        request.crosses = request.alone = crosses and not self.prefills_again

    def needs_whole_prefill(self, request: Request) -> bool:
        """Whether a request's text must be prefilled in one call, without a cached prefix."""
        beyond = self.switch is not None and len(request.text) > self.switch.tokens
        return self.indexed or (beyond and not request.crosses)

    def until_switch(self, request: Request) -> int:
        """Most tokens of a request's text that one call may prefill."""
        left = len(request.text) - request.prefilled
        if self.switch is None or not request.crosses or request.prefilled >= self.switch.tokens:
            return left
        return min(left, self.switch.tokens - request.prefilled)

    def changes(self, request: Request) -> bool:
        """Whether a row must be prefilled again, because its next token has other frequencies than its cached ones."""
        if self.switch is None or request.whole or request.crosses:
            return False
        return request.cached >= self.switch.tokens
