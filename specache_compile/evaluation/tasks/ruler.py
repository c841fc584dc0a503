"""RULER from the person's own files: `<task>/validation.jsonl` as its `prepare.py` writes them, its metrics.

`--data` names the folder that holds a folder for each task (`niah_single_1`, `vt`, `cwe`, `fwe`, `qa_1`, ...). A
record's `input` is the whole prompt; newer versions have the answer's beginning in `answer_prefix`. Every task's
question is the prompt's last line. With `--blind` the lines before it are read before the question is known.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specache_compile.errors import SpecacheError
from specache_compile.evaluation import metrics
from specache_compile.evaluation.runner import Runner

from .records import data_folder, file_hash, read_records
from .task import Ask, Bench, Cell, Outcome, scored

FIELDS = {"input": str, "outputs": list}
NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}  # by the task's first word, RULER's


def kind_of(task: str) -> str | None:
    first = task.split("_")[0]
    return first if first in NEW_TOKENS else None


def ask(bench: Bench, path: Path, record: dict[str, Any]) -> Ask:
    """A record's prompt. For a blind reading its last line is encoded separately."""
    text, begin, encode = record["input"], bench.reader.begin(), bench.reader.encode
    prefix, outputs = record.get("answer_prefix", ""), tuple(map(str, record["outputs"]))
    if not bench.blind:
        return Ask([*begin, *encode(text + prefix)], outputs)
    context, line, question = text.rstrip().rpartition("\n")
    if not context.strip() or not ("?" in question or "Question" in question):  # a chat template adds lines
        raise SpecacheError(
            f"{path}: an input's last line is not its question: --blind cannot tell context and question apart. "
            "Prepare the files with RULER's template for base models"
        )
    behind = encode(line + question + text[len(text.rstrip()) :] + prefix)
    return Ask([*begin, *encode(context), *behind], outputs, question=len(behind))


def cell(bench: Bench, path: Path) -> Cell:
    task = path.parent.name
    kind = kind_of(task)
    assert kind is not None
    records = read_records(path, FIELDS)[: bench.samples]
    if not all(record["outputs"] for record in records):
        raise SpecacheError(f"{path}: a record has no outputs")
    asks = [ask(bench, path, record) for record in records]
    score: Callable[[str, tuple[str, ...]], float] = metrics.found_any if kind == "qa" else metrics.found_all

    def measure(runner: Runner) -> Outcome:
        metric = "any found" if kind == "qa" else "share found"
        return scored(runner, asks, NEW_TOKENS[kind], score, metric, bench.blind)

    longest = max(len(ask.prompt) for ask in asks) + NEW_TOKENS[kind]
    return Cell(task, longest, measure, {"data": file_hash(path)})


def cells(bench: Bench) -> list[Cell]:
    """One cell for each of the folder's folders that is a RULER task."""
    folder = data_folder(bench.data, "ruler")
    paths = [path for path in sorted(folder.glob("*/validation.jsonl")) if kind_of(path.parent.name)]
    if not paths:
        raise SpecacheError(f"no RULER file in {folder}: wanted is TASK/validation.jsonl, TASK as niah_single_1 or vt")
    return [cell(bench, path) for path in paths]
