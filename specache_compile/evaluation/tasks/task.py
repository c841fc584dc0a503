"""What a task is: a function from the bench (what the person asked for) to cells, each one row of the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from specache_compile.errors import SpecacheError
from specache_compile.evaluation.reader import Reader
from specache_compile.evaluation.runner import Runner

from .haystack import library_source


@dataclass(frozen=True)
class Bench:
    """What the person asked for. lengths: contexts in tokens. samples: questions (or windows of text) a cell.

    limit: the model's longest context. texts: files to read in place of the held-out library source. data: folder of
    LongBench or RULER files. chat: put the tokenizer's chat template around LongBench's prompts, and the needles'.
    """

    reader: Reader
    lengths: tuple[int, ...]
    samples: int
    seed: int
    limit: int
    texts: tuple[Path, ...] = ()
    data: Path | None = None
    chat: bool = False

    @cached_property
    def haystack(self) -> list[int]:
        """Token ids of the text that needles hide in and perplexity is measured on."""
        if not self.texts:
            return self.reader.encode(library_source(held_out=True).decode(errors="replace"))
        return [token for path in self.texts for token in self.reader.encode(read_text(path))]


@dataclass(frozen=True)
class Outcome:
    """A cell's figure under one setting."""

    score: float
    metric: str
    samples: int
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One row's work. name: what tells it from the task's other cells. context: its longest, answer included.

    facts: everything else that its figure depends on, for the row's key (file contents as hashes).
    """

    name: str
    context: int
    measure: Callable[[Runner], Outcome]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ask:
    """A prompt as token ids and the references of its answer; `tags` says what kind it is (its depth, ...)."""

    prompt: Sequence[int]
    references: tuple[str, ...]
    tags: dict[str, Any] = field(default_factory=dict)


def read_text(path: Path) -> str:
    """A text file's contents; an error in words where there are none."""
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise SpecacheError(f"{path} is no UTF-8 text ({error.reason} at byte {error.start})") from None
    if not text.strip():
        raise SpecacheError(f"{path} is empty")
    return text


def scored(
    runner: Runner, asks: Sequence[Ask], new_tokens: int, score: Callable[[str, tuple[str, ...]], float], metric: str
) -> Outcome:
    """Ask everything; the mean score, and each ask's own score with its tags."""
    answers = runner.answers([ask.prompt for ask in asks], new_tokens)
    return outcome(asks, answers, score, metric)


def outcome(
    asks: Sequence[Ask], answers: Sequence[str], score: Callable[[str, tuple[str, ...]], float], metric: str
) -> Outcome:
    scores = [score(answer, ask.references) for ask, answer in zip(asks, answers, strict=True)]
    each = [{**ask.tags, "score": value} for ask, value in zip(asks, scores, strict=True)]
    return Outcome(sum(scores) / len(scores), metric, len(scores), {"each": each})
