"""Needle in a haystack: one pass key hidden at some depth of some length of text (SpeCache, Figure 4)."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from specache_compile.evaluation.reader import Reader
from specache_compile.evaluation.runner import Runner

from .haystack import hide
from .task import Bench, Cell, Outcome, TaskQuestion

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
    key, question = random_key(rng), encode(QUESTION)
    prompt = hide(haystack, length, encode(NEEDLE.format(key=key)), depth, question, rng)
    return TaskQuestion(prompt, key, depth, len(question))


def chat_question(
    reader: Reader, haystack: Sequence[int], length: int, depth: float, rng: random.Random
) -> TaskQuestion:
    """As `plain_question`, for a chat model: text, needle and question are one user message in a turn of `length`
    tokens."""
    key, question, (before, behind) = random_key(rng), reader.encode(CHAT_QUESTION), reader.around()
    needle, words = reader.encode(NEEDLE.format(key=key)), length - len(before) - len(behind)
    prompt = [*before, *hide(haystack, words, needle, depth, question, rng), *behind]
    return TaskQuestion(prompt, key, depth, len(question) + len(behind))


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


def is_right(answer: str, key: str, chat: bool) -> bool:
    """Whether the answer begins with the key; whether a chat model's contains it."""
    return key in answer if chat else answer.lstrip().startswith(key)


def measure(runner: Runner, questions: Sequence[TaskQuestion], new_tokens: int, bench: Bench) -> Outcome:
    """The share of the keys that are found. each: a question's depth and score."""
    if bench.blind:
        answers = runner.answers_apart([question.apart for question in questions], new_tokens)
    else:
        answers = runner.answers([question.prompt for question in questions], new_tokens)
    each = [
        {"depth": question.depth, "score": float(is_right(answer, question.answer, bench.chat))}
        for question, answer in zip(questions, answers, strict=True)
    ]
    metric = "keys found, blind" if bench.blind else "keys found"
    return Outcome(statistics.fmean(one["score"] for one in each), metric, len(each), {"each": each})


def cells(bench: Bench) -> list[Cell]:
    """One cell a length."""
    answer = CHAT_ANSWER if bench.chat else len(bench.reader.encode("9" * KEY_DIGITS))

    def cell(length: int) -> Cell:
        rng = random.Random(f"{bench.seed}/{length}")
        questions = [question_at(bench, length - answer, depth, rng) for depth in depths_of(bench)]
        work = functools.partial(measure, questions=questions, new_tokens=answer, bench=bench)
        return Cell(str(length), length, work, {"chat": True} if bench.chat else {})

    return [cell(length) for length in bench.lengths]
