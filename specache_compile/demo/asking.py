"""The demo's prompts: one question and several pass keys, each hidden in a text, in chat prompts of one length."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from specache_compile.bench.ways import Decoding, read, way
from specache_compile.caches.holding import twin as copied
from specache_compile.evaluation.reader import Reader
from specache_compile.evaluation.runner import as_list
from specache_compile.evaluation.tasks.needle import CHAT_ANSWER, chat_ask, chat_prompt
from specache_compile.evaluation.tasks.task import Ask

LINE = "\nNote to the board: the password of the archive is 'lighthouse', and Amelia Hart keeps the second key.\n"
QUESTION = "\nAccording to the note to the board, what is the password of the archive?"


def asks_of(reader: Reader, text: Sequence[int], length: int, depths: Sequence[float]) -> list[Ask]:
    """The question, then a key at each depth, in prompts of `length` tokens. Every method gets the same."""
    prompt = chat_prompt(reader, text, length, [(0.4, LINE)], QUESTION, random.Random(1))
    rng = random.Random(length)
    return [Ask(prompt, ("lighthouse",)), *(chat_ask(reader, text, length, depth, rng) for depth in depths)]


class Prompts:
    """Prompts of one length. The uncompiled model reads them once, exactly; every method goes on from there with the
    first token of the uncompiled model's answer, as `generate` does."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        self.ids = torch.tensor([list(prompt) for prompt in prompts], device=model.device)
        self.plain, self.first = read(model, self.ids)

    def begun(self, name: str, twin: Any, number: int, room: int) -> Decoding:
        """Prompt `number` in a way's cache."""
        one = slice(number, number + 1)
        row = copied(self.plain)
        row.batch_select_indices(torch.tensor([number], device=self.ids.device))
        return way(name, twin, self.ids[one], row, self.first[one], room)


def answer(one: Decoding, reader: Reader) -> str:
    """A greedy answer, up to the model's own end."""
    said = [int(one.token)]
    for _ in range(CHAT_ANSWER - 1):
        one.step()
        said.append(int(one.token))
    ends = as_list(one.model.generation_config.eos_token_id)
    until = next((place for place, token in enumerate(said) if token in ends), len(said))
    return reader.decode(said[:until]).strip()
