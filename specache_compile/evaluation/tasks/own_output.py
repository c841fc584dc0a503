"""Summaries, reconstructions and answers to instructions, scored against the full cache's own output (RoCo, arXiv
2402.06262, Tables 2 to 4).

The texts are `--text`'s windows and the instructions a few of our own, in place of the paper's data sets. Every method
gets the same prompts and answers greedily.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specache_compile.evaluation.intervals import interval
from specache_compile.evaluation.metrics import overlaps, rouge_l
from specache_compile.evaluation.runner import Runner

from .task import Bench, Cell, Outcome

SUMMARY, RECONSTRUCTION, INSTRUCTION = "summary", "reconstruction", "instruction"
REQUESTS = {
    SUMMARY: "\n\nSummarize the text above in a few sentences.",
    RECONSTRUCTION: "\n\nRepeat the text above word for word, from its beginning.",
}
NEW_TOKENS = {SUMMARY: 96, RECONSTRUCTION: 128, INSTRUCTION: 256}
INSTRUCTIONS = tuple(
    f"{verb} {what}."
    for verb, things in (
        ("Explain", ("how a bicycle stays upright", "why the sky is blue", "what inflation does to savings",
                     "how bread rises", "how vaccines work", "what a budget is for")),
        ("Write", ("a short story about a lighthouse keeper", "a letter that thanks a teacher",
                   "a poem about autumn", "a plan for a week of simple dinners", "a speech for a small wedding",
                   "a review of an imaginary restaurant")),
        ("List", ("ten uses of a paper clip", "steps to plant a tree", "things to pack for a hike in the mountains",
                  "ways to save water at home", "famous rivers and the countries that they cross",
                  "questions to ask at a job interview")),
        ("Compare", ("cats and dogs as pets", "trains and planes for long journeys", "tea and coffee",
                     "paper books and electronic books")),
        ("Describe", ("a day on a farm", "a busy market", "how to repair a flat tyre",
                      "the life of a honey bee", "a game for children on a rainy day", "what makes a good friend")),
        ("Give advice to", ("someone who learns to swim", "a student before an exam",
                            "a family that moves to another country", "a person who cannot sleep")),
    )
    for what in things
)  # fmt: skip


@dataclass
class Outputs:
    """The prompts of a cell, and the full cache's answers, made on first use and shared by all methods.

    texts: what each prompt's answer should repeat; empty where it should not.
    """

    prompts: Sequence[Sequence[int]]
    texts: Sequence[str]
    new_tokens: int
    made: list[str] | None = None

    def of(self, runner: Runner) -> list[str]:
        if self.made is None:
            with runner.uncompiled():
                self.made = runner.answers(self.prompts, self.new_tokens)
        return self.made


def measure(runner: Runner, full: Outputs) -> Outcome:
    """The score is the mean ROUGE-L to the full cache's output.

    each: a text's scores and the text.
    overlaps: their means and 95 % intervals, by name.
    to_the_text: the mean ROUGE-L of the full cache's own output to what it should repeat; None where it should not.
    """
    references = full.of(runner)
    answers = runner.answers(full.prompts, full.new_tokens)
    each = [overlaps(answer, reference) for answer, reference in zip(answers, references, strict=True)]
    columns = {name: [one[name] for one in each] for name in each[0]}
    repeated = [rouge_l(reference, text) for reference, text in zip(references, full.texts, strict=False)]
    detail: dict[str, Any] = {
        "each": [{**one, "text": answer} for one, answer in zip(each, answers, strict=True)],
        "overlaps": {name: (statistics.fmean(values), interval(values)) for name, values in columns.items()},
        "to_the_text": statistics.fmean(repeated) if repeated else None,
    }
    return Outcome(statistics.fmean(columns["ROUGE-L"]), "ROUGE-L to the full cache's output", len(each), detail)


def about_texts(bench: Bench, length: int, kind: str) -> Outputs:
    """Windows of text with a request behind each; `length` tokens with the answer."""
    before, behind = bench.reader.turn()
    request, begin = bench.reader.encode(REQUESTS[kind]), len(bench.reader.begin())
    room = length - NEW_TOKENS[kind] - len(before) - len(request) - len(behind)
    windows = [window[begin:] for window in bench.windows_apart(room + begin)]
    texts = [bench.reader.decode(window[: NEW_TOKENS[kind]]) for window in windows] if kind == RECONSTRUCTION else []
    return Outputs([[*before, *window, *request, *behind] for window in windows], texts, NEW_TOKENS[kind])


def of_instructions(bench: Bench) -> Outputs:
    before, behind = bench.reader.turn()
    asked = [[*before, *bench.reader.encode(text), *behind] for text in INSTRUCTIONS[: bench.samples]]
    return Outputs(sorted(asked, key=len), [], NEW_TOKENS[INSTRUCTION])


def cells(bench: Bench) -> list[Cell]:
    """Two cells for each length, summaries and reconstructions, and one of instructions, at most as many as there
    are."""

    def cell(name: str, length: int, full: Outputs) -> Cell:
        return Cell(name, length, functools.partial(measure, full=full), {"new tokens": full.new_tokens})

    about = [cell(f"{n} {kind}", n, about_texts(bench, n, kind)) for n in bench.lengths for kind in REQUESTS]
    asked = of_instructions(bench)
    return [*about, cell(INSTRUCTION, len(asked.prompts[-1]) + asked.new_tokens, asked)]
