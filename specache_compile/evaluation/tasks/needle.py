"""Needle in a haystack: one pass key hidden at some depth of some length of text (SpeCache, Figure 4)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from specache_compile.evaluation.metrics import exact

from .haystack import hide
from .task import Ask, Bench, Cell, scored

NEEDLE = "\nThe pass key is {key}. Remember it.\n"
QUESTION = "\nWhat is the pass key? The pass key is "
KEY_DIGITS = 5
DEPTHS = 11


def random_key(rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") for _ in range(KEY_DIGITS))


def ask(
    haystack: Sequence[int], length: int, depth: float, rng: random.Random, encode: Callable[[str], Sequence[int]]
) -> Ask:
    """A prompt of exactly `length` tokens whose needle stands at `depth` (0 = first, 1 = right before the question)."""
    key = random_key(rng)
    needles = [(depth, encode(NEEDLE.format(key=key)))]
    return Ask(hide(haystack, length, needles, encode(QUESTION), rng), (key,), {"depth": depth})


def cells(bench: Bench) -> list[Cell]:
    """One cell a length; the samples are spread evenly over eleven depths (fewer where there are fewer samples)."""
    answer = len(bench.reader.encode("9" * KEY_DIGITS))

    def cell(length: int) -> Cell:
        rng, begin, depths = random.Random(f"{bench.seed}/{length}"), bench.reader.begin(), min(DEPTHS, bench.samples)
        room = length - answer - len(begin)
        places = [i % depths / max(1, depths - 1) for i in range(bench.samples)]
        asks = [ask(bench.haystack, room, depth, rng, bench.reader.encode) for depth in sorted(places)]
        asks = [Ask([*begin, *one.prompt], one.references, one.tags) for one in asks]
        return Cell(
            str(length), length, lambda runner: scored(runner, asks, answer, lambda a, r: exact(a, r[0]), "keys found")
        )

    return [cell(length) for length in bench.lengths]
