"""A task is a function from the bench (the user's settings) and a length to a cell: one row of the results."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from specache_compile.errors import SpecacheError
from specache_compile.evaluation.reader import Reader
from specache_compile.evaluation.runner import Runner

from .haystack import library_source, too_short


@dataclass(frozen=True)
class Bench:
    """The user's settings of an evaluation.

    samples: questions or text windows per cell.
    texts: files that replace the held-out library source.
    chat: whether the chat template is applied to the needles' prompts.
    blind: whether the context is prefilled before the question.
    keys: number of named keys in a prompt of needle; 0: one without a name.
    """

    reader: Reader
    samples: int
    seed: int
    texts: tuple[Path, ...] = ()
    chat: bool = False
    blind: bool = False
    keys: int = 0

    @cached_property
    def haystack(self) -> list[int]:
        """Token ids of the text that needles hide in and perplexity is measured on."""
        if not self.texts:
            return self.reader.encode(library_source(held_out=True).decode(errors="replace"))
        return [token for path in self.texts for token in self.reader.encode(read_text(path))]

    def windows_apart(self, length: int) -> list[list[int]]:
        """`samples` windows of `length` tokens, one from each of as many equal parts of the text.

        Intervals require independent windows, so there is a warning if the text is too short for disjoint windows.
        """
        rng, begin = random.Random(f"{self.seed}/{length}"), self.reader.begin()
        size, part = length - len(begin), len(self.haystack) / self.samples
        if size < 1:
            raise SpecacheError(
                f"--lengths: too short, {length} tokens are left of a context for its text; give longer ones"
            )
        if size >= len(self.haystack):
            raise too_short(len(self.haystack), size)
        if part < size:
            warnings.warn(
                f"{self.samples} windows of {size:,} tokens overlap in a text of {len(self.haystack):,}: their "
                "intervals are narrower than they should be; give more --text, or --samples "
                f"{len(self.haystack) // size}",
                stacklevel=2,
            )
        starts = [number * part + rng.random() * max(0.0, part - size) for number in range(self.samples)]
        last = len(self.haystack) - size
        return [[*begin, *self.haystack[(start := min(int(place), last)) : start + size]] for place in starts]


@dataclass(frozen=True)
class Outcome:
    """A cell's figure under one setting."""

    score: float
    metric: str
    samples: int
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One row's work.

    name: unique within the task.
    context: its longest, answer included.
    facts: everything else that the figure depends on, for the row's key.
    """

    name: str
    context: int
    measure: Callable[[Runner], Outcome]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskQuestion:
    """A prompt as token ids, the answer that is right, and the depth of its needle.

    question: how many tokens at the prompt's end are the question and what follows it.
    """

    prompt: Sequence[int]
    answer: str
    depth: float
    question: int

    @property
    def apart(self) -> tuple[Sequence[int], Sequence[int]]:
        """Context and question."""
        cut = len(self.prompt) - self.question
        return self.prompt[:cut], self.prompt[cut:]


def read_text(path: Path) -> str:
    """A text file's contents; SpecacheError where it cannot be read."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise SpecacheError(f"{path} is no UTF-8 text ({error.reason} at byte {error.start})") from None
    if not text.strip():
        raise SpecacheError(f"{path} is empty")
    return text
