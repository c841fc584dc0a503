"""SCBench from the person's own files: several questions on one shared context, each from a copy of its cache.

`--data` names the folder of `scbench_kv.jsonl` and the like. A record has a `context` and `multi_turns`, each with
`input` and `answer`. This is SCBench's multi-request mode: the context is read once, before any question is known. Each
file is a cell. `--samples` counts questions; a context brings all of its own. A prompt is the context, an empty line
and the turn's input, without the sentence that SCBench's program puts before some contexts, so figures compare methods
only. The Chinese file, and files that compare code or mix two kinds of turns, are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specache_compile.errors import SpecacheError
from specache_compile.evaluation import metrics
from specache_compile.evaluation.runner import Runner

from .prompts import around, without_middle
from .records import Fields, checked, data_folder, file_hash, placed_records
from .task import Ask, Bench, Cell, Outcome, Score, scored_over

CHOICES = "ABCD"


@dataclass(frozen=True)
class Dataset:
    """new_tokens: SCBench's length of an answer.
    options: whether a turn has four options, one of which is the answer.
    """

    new_tokens: int
    metric: str
    score: Score
    options: bool = False


def best_f1(answer: str, references: tuple[str, ...]) -> float:
    return max(metrics.f1(answer, reference) for reference in references)


def summary(answer: str, references: tuple[str, ...]) -> float:
    return max(metrics.rouge_l(answer, reference) for reference in references)


DATASETS = {
    "scbench_kv": Dataset(150, "values found", metrics.contained),
    "scbench_prefix_suffix": Dataset(150, "strings found", metrics.contained),
    "scbench_vt": Dataset(30, "names found", metrics.found_all),
    "scbench_qa_eng": Dataset(40, "F1", best_f1),
    "scbench_choice_eng": Dataset(40, "accuracy", metrics.first_letter, options=True),
    "scbench_many_shot": Dataset(10, "accuracy", metrics.found_any),
    "scbench_mf": Dataset(5, "accuracy", metrics.first_number),
    "scbench_summary": Dataset(200, "ROUGE-L", summary),
}


def references(turn: Mapping[str, Any], place: str, dataset: Dataset) -> tuple[str, ...]:
    """A turn's answer: a text, a number or a list of them, or the letter of an option."""
    answer = turn["answer"]
    if dataset.options:
        if answer not in (*CHOICES, *turn["options"]):
            raise SpecacheError(f"{place}: field 'answer' is {answer!r}, and neither a letter nor one of the options")
        return (answer if answer in CHOICES else CHOICES[turn["options"].index(answer)],)
    found = tuple(map(str, answer)) if isinstance(answer, list) else (str(answer),)
    if not found or not all(found):
        raise SpecacheError(f"{place}: field 'answer' is empty")
    return found


def question(turn: Mapping[str, Any], place: str, dataset: Dataset) -> str:
    text = f"\n\n{turn['input']}"
    if not dataset.options:
        return text
    if len(turn["options"]) != len(CHOICES):
        raise SpecacheError(f"{place}: field 'options' has {len(turn['options'])} entries, not {len(CHOICES)}")
    lines = [f"{letter}. {option}" for letter, option in zip(CHOICES, turn["options"], strict=True)]
    return "\n".join([text, *lines, "Answer: "])


def shared(bench: Bench, dataset: Dataset, place: str, record: Mapping[str, Any]) -> tuple[list[int], list[Ask]]:
    """A record's context as token ids, and its questions. Beyond the model's own context it loses its middle."""
    encode = bench.reader.encode
    fields: Fields = {"input": str, "answer": (str, int, list), **({"options": list} if dataset.options else {})}
    before, behind = around(bench, bench.chat)
    asks = []
    for number, turn in enumerate(record["multi_turns"], 1):
        turn_place = f"{place}, turn {number}"
        checked(turn, fields, turn_place)
        ids = [*encode(question(turn, turn_place, dataset)), *behind]
        asks.append(Ask(ids, references(turn, turn_place, dataset), {"turn": number}))
    if not asks:
        raise SpecacheError(f"{place}: field 'multi_turns' is empty")
    room = bench.limit - len(before) - max(len(ask.prompt) for ask in asks) - dataset.new_tokens
    if room < 1:
        raise SpecacheError(f"{place}: its questions leave no room for a context in {bench.limit:,} tokens")
    return [*before, *without_middle(encode(str(record["context"])), room)], asks


def first_contexts(bench: Bench, path: Path) -> list[tuple[list[int], list[Ask]]]:
    """As many contexts as bring `samples` questions."""
    contexts: list[tuple[list[int], list[Ask]]] = []
    for place, record in placed_records(path, {"context": (str, list), "multi_turns": list}):
        if sum(len(asks) for _, asks in contexts) >= bench.samples:
            break
        contexts.append(shared(bench, DATASETS[path.stem], place, record))
    return contexts


def cell(bench: Bench, path: Path) -> Cell:
    dataset, contexts = DATASETS[path.stem], first_contexts(bench, path)

    def measure(runner: Runner) -> Outcome:
        return scored_over(runner, contexts, dataset.new_tokens, dataset.score, dataset.metric)

    longest = max(len(context) + max(len(ask.prompt) for ask in asks) for context, asks in contexts)
    facts = {"data": file_hash(path), "chat": bench.chat}
    return Cell(path.stem.removeprefix("scbench_"), longest + dataset.new_tokens, measure, facts)


def cells(bench: Bench) -> list[Cell]:
    """One cell for each of the folder's files that is known."""
    folder = data_folder(bench.data, "scbench")
    paths: Sequence[Path] = [path for path in sorted(folder.glob("scbench_*.jsonl")) if path.stem in DATASETS]
    if not paths:
        raise SpecacheError(f"no SCBench file in {folder}: wanted is one of {', '.join(DATASETS)} (.jsonl)")
    return [cell(bench, path) for path in paths]
