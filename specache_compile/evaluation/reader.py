"""Text to token ids and back, with what stands before a prompt and around a turn of chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specache_compile.errors import SpecacheError

# Stands for a user's words in a chat template.
WORDS = "the words of the user"


@dataclass
class Reader:
    """A Hugging Face tokenizer; its special tokens (a BOS, mostly) stand once, before the prompt."""

    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def begin(self) -> list[int]:
        bos = self.tokenizer.bos_token_id
        return [] if bos is None or list(self.tokenizer("")["input_ids"])[:1] != [bos] else [bos]

    def chat(self, text: str) -> list[int]:
        """The whole prompt of one turn in which a user says `text`, special tokens and all."""
        return list(chat_turn(self.tokenizer, text, return_dict=True)["input_ids"])

    def around(self) -> tuple[list[int], list[int]]:
        """What stands before and behind a user's words in one turn, so that a prompt can be made to a length."""
        before, _, behind = chat_turn(self.tokenizer, WORDS, tokenize=False).partition(WORDS)
        return self.encode(before), self.encode(behind)

    def turn(self) -> tuple[list[int], list[int]]:
        """As `around`; of a tokenizer without a chat template nothing, and the end of a line."""
        return self.around() if self.tokenizer.chat_template else ([], self.encode("\n"))


def chat_turn(tokenizer: Any, text: str, **more: Any) -> Any:
    """One turn in which a user says `text`, up to where the answer begins; more: as `apply_chat_template` has it.
    SpecacheError where the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        raise SpecacheError("this checkpoint's tokenizer has no chat template")
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, **more)
