"""Several questions on one cached context, each from a copy of its cache (SCBench's shared-context mode).

The context is read before any question is known. A method that drops pairs has by then dropped what a later question
may need. A method that keeps all pairs on the host has not.
"""

from __future__ import annotations

import random

from .haystack import hide
from .needle import KEY_DIGITS, found, random_key
from .task import Ask, Bench, Cell, scored_over

QUESTIONS = 4
NAMES = ("amber", "birch", "cedar", "delta", "ember", "flint", "grove", "heron", "ivory", "jaspis", "koala", "lemon")
NEEDLE = "\nThe pass key of {name} is {key}. Remember it.\n"
QUESTION = "\nWhat is the pass key of {name}? The pass key of {name} is "


def shared(bench: Bench, length: int, rng: random.Random) -> tuple[list[int], list[Ask]]:
    """A context with four named keys, and a question for each; its prompt is only what follows the context."""
    encode, begin = bench.reader.encode, bench.reader.begin()
    names = rng.sample(NAMES, QUESTIONS)
    keys = {name: random_key(rng) for name in names}
    asks = [Ask(encode(QUESTION.format(name=name)), (keys[name],), {"turn": i}) for i, name in enumerate(names)]
    needles = [(rng.random(), encode(NEEDLE.format(name=name, key=key))) for name, key in keys.items()]
    room = length - len(begin) - max(len(ask.prompt) for ask in asks)
    return [*begin, *hide(bench.haystack, room, needles, (), rng)], asks


def cells(bench: Bench) -> list[Cell]:
    """One cell a length; a fourth as many contexts as samples, four questions on each."""
    answer = len(bench.reader.encode("9" * KEY_DIGITS))

    def cell(length: int) -> Cell:
        rng = random.Random(f"{bench.seed}/{length}")
        contexts = [shared(bench, length - answer, rng) for _ in range(-(-bench.samples // QUESTIONS))]
        return Cell(str(length), length, lambda runner: scored_over(runner, contexts, answer, found, "keys found"))

    return [cell(length) for length in bench.lengths]
