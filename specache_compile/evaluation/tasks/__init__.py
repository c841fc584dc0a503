"""The tasks of `specache eval`, one file each; `TASKS` maps a name on the command line to its cells."""

from __future__ import annotations

from collections.abc import Callable

from . import (
    closeness,
    long,
    longbench,
    longbench_v2,
    needle,
    own_output,
    perplexity,
    ruler,
    scbench,
    shared_context,
)
from .task import Bench, Cell

TASKS: dict[str, Callable[[Bench], list[Cell]]] = {
    "needle": needle.cells,
    "shared_context": shared_context.cells,
    "perplexity": perplexity.cells,
    "closeness": closeness.cells,
    "long": long.cells,
    "own_output": own_output.cells,
    "longbench": longbench.cells,
    "longbench_v2": longbench_v2.cells,
    "ruler": ruler.cells,
    "scbench": scbench.cells,
}
# Tasks whose answer is in the text, and found or not.
FOUND_OR_NOT = ("needle", "shared_context", "ruler")
# Tasks that measure text, not answers.
NO_QUESTION = ("perplexity", "closeness", "long", "own_output")
