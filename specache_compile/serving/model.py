"""The one checkpoint of a server: loaded without any code of its own, and compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.cli.serving.model_manager import ModelManager

from specache_compile.checkpoints import is_byte_level, placed, resolved


class ServedModel(ModelManager):
    """What the handlers of `transformers serve` ask for a model and its tokenizer, by the name that was typed."""

    def __init__(self, checkpoint: str, device: str, options: Mapping[str, Any]) -> None:
        self.checkpoint, self.target, self.options = resolved(checkpoint), device, dict(options)
        super().__init__(force_model=checkpoint)

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """There is one model and no revision of it."""
        return model_id

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""
        return int(self.one()[0].config.get_text_config().vocab_size)

    def one(self) -> tuple[Any, Any]:
        """The model and its tokenizer."""
        return self.load_model_and_processor(str(self.force_model))

    def _load_processor(self, *given: Any, **more: Any) -> Any:
        if is_byte_level(self.checkpoint):
            return byte_tokenizer()
        return AutoTokenizer.from_pretrained(self.checkpoint, trust_remote_code=False)

    def _load_model(self, *given: Any, **more: Any) -> Any:
        loader: Any = AutoModelForCausalLM
        model = loader.from_pretrained(self.checkpoint, dtype="auto", trust_remote_code=False, use_safetensors=True)
        model = placed(model, self.target)
        model.compile(backend="specache", options=self.options)
        return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Token id = byte value."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
