"""Needle in a haystack: a pass key hidden at some depth of some length of text (SpeCache, Figure 4).

Named keys stand twice in their needle, and the question requests one (the multi-key needle of RULER, arXiv 2404.06654).
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Sequence

from specache_compile.evaluation.runner import Runner

from .haystack import hide
from .task import Bench, Cell, Outcome, TaskQuestion

NEEDLE = "\nThe pass key is {key}. Remember it.\n"
QUESTION = "\nWhat is the pass key? The pass key is "
NAMED_NEEDLE = "\nThe pass key of {name} is {key}. Remember it. {key} is the pass key of {name}.\n"
NAMED_QUESTION = "\nWhat is the pass key of {name}?\nThe pass key of {name} is "
NAMES = ("London", "Paris", "Tokyo", "Cairo", "Berlin", "Madrid", "Moscow", "Dublin")
# The question to a chat model, and the most tokens of its answer.
CHAT_QUESTION = "\nWhat is the pass key? Answer with the five digits."
CHAT_NAMED_QUESTION = "\nWhat is the pass key of {name}? Answer with the five digits."
CHAT_ANSWER = 16
KEY_DIGITS = 5
DEPTHS = 11


def random_key(rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") for _ in range(KEY_DIGITS))


def key_question(
    haystack: Sequence[int], length: int, depth: float, rng: random.Random, encode: Callable[[str], Sequence[int]],
    keys: int = 0, around: tuple[Sequence[int], Sequence[int]] = ((), ()), chat: bool = False,
) -> TaskQuestion:  # fmt: skip
    """A prompt of exactly `length` tokens whose needle is at `depth` (0 = first, 1 = right before the question).

    keys: number of named needles, of which all but the requested one have random depths; 0: one without a name.
    around: tokens before and after text, needles and question, such as those of a chat model's turn.
    chat: whether the question is one to a chat model.
    """
    key, names = random_key(rng), rng.sample(NAMES, keys) if keys else [""]
    placed = [(depth, key), *((rng.random(), random_key(rng)) for _ in names[1:])]
    needle = NAMED_NEEDLE if keys else NEEDLE
    needles = [(at, encode(needle.format(name=name, key=one))) for name, (at, one) in zip(names, placed, strict=True)]
    texts = (CHAT_QUESTION, CHAT_NAMED_QUESTION) if chat else (QUESTION, NAMED_QUESTION)
    question, (before, behind) = encode(texts[bool(keys)].format(name=names[0])), around
    words = hide(haystack, length - len(before) - len(behind), needles, question, rng)
    return TaskQuestion([*before, *words, *behind], key, depth, len(question) + len(behind))


def depths_of(bench: Bench) -> list[float]:
    """A depth for each sample, spread evenly over eleven depths, or fewer if there are fewer samples."""
    depths = min(DEPTHS, bench.samples)
    return sorted(i % depths / max(1, depths - 1) for i in range(bench.samples))


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


def cell(bench: Bench, length: int) -> Cell:
    answer = CHAT_ANSWER if bench.chat else len(bench.reader.encode("9" * KEY_DIGITS))
    around = bench.reader.around() if bench.chat else (bench.reader.begin(), [])
    rng = random.Random(f"{bench.seed}/{length}")
    questions = [
        key_question(bench.haystack, length - answer, depth, rng, bench.reader.encode, bench.keys, around, bench.chat)
        for depth in depths_of(bench)
    ]
    work = functools.partial(measure, questions=questions, new_tokens=answer, bench=bench)
    facts = {**({"chat": True} if bench.chat else {}), **({"keys": bench.keys} if bench.keys else {})}
    return Cell(str(length), length, work, facts)
