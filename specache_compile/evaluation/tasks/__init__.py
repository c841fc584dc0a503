"""The tasks of `specache eval`, one file each; `TASKS` maps a name on the command line to its cell of a length."""

from __future__ import annotations

from collections.abc import Callable

from . import closeness, long, needle, perplexity
from .task import Bench, Cell

TASKS: dict[str, Callable[[Bench, int], Cell]] = {
    "needle": needle.cell,
    "perplexity": perplexity.cell,
    "closeness": closeness.cell,
    "long": long.cell,
}
# Tasks that measure text, not answers.
NO_QUESTION = ("perplexity", "closeness", "long")
