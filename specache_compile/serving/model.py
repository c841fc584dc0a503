"""The one checkpoint of a server: loaded without any code of its own, and compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from specache_compile.checkpoints import is_byte_level, placed, resolved


class ServedModel:
    """The model, compiled, and its tokenizer, by the name that was typed."""

    def __init__(self, checkpoint: str, device: str, options: Mapping[str, Any]) -> None:
        self.name, folder = checkpoint, resolved(checkpoint)
        self.tokenizer: Any = (
            byte_tokenizer()
            if is_byte_level(folder)
            else AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        )
        loader: Any = AutoModelForCausalLM
        model = loader.from_pretrained(folder, dtype="auto", trust_remote_code=False, use_safetensors=True)
        self.model: Any = placed(model, device)
        self.model.compile(backend="specache", options=dict(options))

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""
        return int(self.model.config.get_text_config().vocab_size)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Token id = byte value."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
