"""The checkpoint of a server, loaded without its own code and compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import AutoModelForCausalLM

from specache_compile.checkpoints.loaded import placed, tokenizer_of
from specache_compile.checkpoints.names import resolved


class ServedModel:
    """The compiled model and its tokenizer, under the name that the user typed."""

    def __init__(self, checkpoint: str, device: str, options: Mapping[str, Any]) -> None:
        self.name, folder = checkpoint, resolved(checkpoint)
        self.tokenizer = tokenizer_of(folder, trust_remote_code=False)
        loader: Any = AutoModelForCausalLM
        model = loader.from_pretrained(folder, dtype="auto", trust_remote_code=False, use_safetensors=True)
        self.model: Any = placed(model, device)
        self.model.compile(backend="specache", options=dict(options))
        # For answers with a grammar. It takes a second, so it is created before the first request.
        size = max(self.vocabulary, len(self.tokenizer))
        ends = self.model.generation_config.eos_token_id
        self.grammar_tokenizer: LLTokenizer = from_tokenizer(self.tokenizer, size, ends)

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model has."""
        return int(self.model.config.get_text_config().vocab_size)
