"""The tasks of `specache eval`, one file each; `TASKS` maps a name on the command line to its cells."""

from __future__ import annotations

from collections.abc import Callable

from . import closeness, long, needle, perplexity
from .task import Bench, Cell

TASKS: dict[str, Callable[[Bench], list[Cell]]] = {
    "needle": needle.cells,
    "perplexity": perplexity.cells,
    "closeness": closeness.cells,
    "long": long.cells,
}
# Tasks that measure text, not answers.
NO_QUESTION = ("perplexity", "closeness", "long")
