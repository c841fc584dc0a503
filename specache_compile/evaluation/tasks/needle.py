"""Needle in a haystack: one pass key hidden at some depth of some length of text (SpeCache, Figure 4)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from specache_compile.evaluation.reader import Reader

from .haystack import hide
from .task import Bench, Cell, TaskQuestion, scored

NEEDLE = "\nThe pass key is {key}. Remember it.\n"
QUESTION = "\nWhat is the pass key? The pass key is "
# The question to a chat model, and the most tokens of its answer.
CHAT_QUESTION = "\nWhat is the pass key? Answer with the five digits."
CHAT_ANSWER = 16
KEY_DIGITS = 5
DEPTHS = 11


def random_key(rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") for _ in range(KEY_DIGITS))


def plain_question(
    haystack: Sequence[int], length: int, depth: float, rng: random.Random, encode: Callable[[str], Sequence[int]]
) -> TaskQuestion:
    """A prompt of exactly `length` tokens whose needle is at `depth` (0 = first, 1 = right before the question)."""
    key = random_key(rng)
    needles, question = [(depth, encode(NEEDLE.format(key=key)))], encode(QUESTION)
    return TaskQuestion(hide(haystack, length, needles, question, rng), key, {"depth": depth}, len(question))


def chat_prompt(
    reader: Reader, haystack: Sequence[int], length: int, needles: Sequence[tuple[float, str]], question: str,
    rng: random.Random,
) -> list[int]:  # fmt: skip
    """As `hide`, for a chat model: text, needles and question are one user message in a turn of `length` tokens."""
    before, behind = reader.around()
    hidden = [(depth, reader.encode(needle)) for depth, needle in needles]
    words = hide(haystack, length - len(before) - len(behind), hidden, reader.encode(question), rng)
    return [*before, *words, *behind]


def chat_question(
    reader: Reader, haystack: Sequence[int], length: int, depth: float, rng: random.Random
) -> TaskQuestion:
    """As `plain_question`, for a chat model."""
    key = random_key(rng)
    needles = [(depth, NEEDLE.format(key=key))]
    prompt = chat_prompt(reader, haystack, length, needles, CHAT_QUESTION, rng)
    behind = len(reader.encode(CHAT_QUESTION)) + len(reader.around()[1])
    return TaskQuestion(prompt, key, {"depth": depth}, behind)


def depths_of(bench: Bench) -> list[float]:
    """A depth for each sample, spread evenly over eleven depths, or fewer if there are fewer samples."""
    depths = min(DEPTHS, bench.samples)
    return sorted(i % depths / max(1, depths - 1) for i in range(bench.samples))


def question_at(bench: Bench, length: int, depth: float, rng: random.Random) -> TaskQuestion:
    if bench.chat:
        return chat_question(bench.reader, bench.haystack, length, depth, rng)
    begin = bench.reader.begin()
    one = plain_question(bench.haystack, length - len(begin), depth, rng, bench.reader.encode)
    return replace(one, prompt=[*begin, *one.prompt])


def begins_with_key(answer: str, key: str) -> float:
    """Whether the answer begins with the key."""
    return float(answer.lstrip().startswith(key))


def contains_key(answer: str, key: str) -> float:
    """Whether a chat model's answer contains the key."""
    return float(key in answer)


def cells(bench: Bench) -> list[Cell]:
    """One cell a length."""
    answer = CHAT_ANSWER if bench.chat else len(bench.reader.encode("9" * KEY_DIGITS))
    score, facts = (contains_key, {"chat": True}) if bench.chat else (begins_with_key, {})

    def cell(length: int) -> Cell:
        rng = random.Random(f"{bench.seed}/{length}")
        questions = [question_at(bench, length - answer, depth, rng) for depth in depths_of(bench)]
        return Cell(
            str(length),
            length,
            lambda runner: scored(runner, questions, answer, score, "keys found", bench.blind),
            facts,
        )

    return [cell(length) for length in bench.lengths]
