"""Convert text to token ids and back, with special tokens and the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specache_compile.errors import SpecacheError

# The placeholder of a user message in a chat template.
WORDS = "the words of the user"


@dataclass
class Reader:
    """A Hugging Face tokenizer whose special tokens (usually a BOS) are added once, before the prompt."""

    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def begin(self) -> list[int]:
        bos = self.tokenizer.bos_token_id
        return [] if bos is None or list(self.tokenizer("")["input_ids"])[:1] != [bos] else [bos]

    def around(self) -> tuple[list[int], list[int]]:
        """The tokens before and after a user message, so that a prompt of a given length can be built."""
        before, _, behind = chat_turn(self.tokenizer, WORDS, tokenize=False).partition(WORDS)
        return self.encode(before), self.encode(behind)

    def turn(self) -> tuple[list[int], list[int]]:
        """As `around`; without a chat template, nothing and a line end."""
        return self.around() if self.tokenizer.chat_template else ([], self.encode("\n"))


def chat_turn(tokenizer: Any, text: str, **more: Any) -> Any:
    """The prompt of one turn with the user message `text`; more: arguments of `apply_chat_template`.

    SpecacheError if the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise SpecacheError("this checkpoint's tokenizer has no chat template: leave out --chat, or use a chat model")
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, **more)
