"""The key search: prompts with a hidden pass key, and each method's answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from specache_compile.evaluation.reader import Reader
from specache_compile.evaluation.runner import as_list
from specache_compile.evaluation.tasks.needle import CHAT_ANSWER, chat_question
from specache_compile.evaluation.tasks.task import TaskQuestion

from .measurements import BenchPlan, measured
from .runners import Decoding, prefill


def questions_of(reader: Reader, text: Sequence[int], length: int, depths: Sequence[float]) -> list[TaskQuestion]:
    """A prompt of `length` tokens for each depth of the key in the text."""
    rng = random.Random(length)
    return [chat_question(reader, text, length, depth, rng) for depth in depths]


def key_search(
    model: Any, reader: Reader, questions: Sequence[TaskQuestion], plan: BenchPlan, bar: tqdm
) -> list[dict[str, Any]]:
    """As `measurements.cell`, after the first prompt; each row also has the answers to all prompts ("keys")."""
    prefills = []
    for number, question in enumerate(questions, 1):
        bar.set_postfix_str(f"prefill of prompt {number} of {len(questions)}")
        prefills.append(prefill(model, torch.tensor([list(question.prompt)], device=model.device)))
        bar.update()
    return measured(model, prefills, plan, bar, lambda number, one: answered(questions[number], one, reader))


def answered(question: TaskQuestion, one: Decoding, reader: Reader) -> dict[str, Any]:
    """Generate a greedy answer up to the end token, and look for the key in it."""
    ends = as_list(one.model.generation_config.eos_token_id)
    tokens = [int(one.token)]
    while len(tokens) < CHAT_ANSWER and tokens[-1] not in ends:
        one.step()
        tokens.append(int(one.token))
    answer = reader.decode([token for token in tokens if token not in ends]).strip()
    found = question.answer in answer
    return {"depth": question.depth, "key": question.answer, "answer": answer, "found": found}
