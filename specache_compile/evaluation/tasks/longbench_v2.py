"""LongBench v2 from the person's own files: multiple choice over long texts, its prompt, accuracy by length.

`--data` names the folder with `data.json` (or `data.jsonl`, a record a line) and the prompt `0shot.txt`, which may also
be in `prompts/`. Each length (short, medium, long) is a cell of `--samples` questions. The row's detail has the scores
by difficulty and domain. A text beyond the model's context loses its middle.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specache_compile.errors import SpecacheError
from specache_compile.evaluation import metrics
from specache_compile.evaluation.runner import Runner

from .prompts import around, parted
from .records import check_known, data_folder, file_hash, placed_records, text_of
from .task import Ask, Bench, Cell, Outcome, scored

LENGTHS = ("short", "medium", "long")
CHOICES = ("A", "B", "C", "D")
NEW_TOKENS = 128
# The prompt's placeholders for a record's fields; the text's is the first.
PLACES = {"$DOC$": "context", "$Q$": "question", **{f"$C_{letter}$": f"choice_{letter}" for letter in CHOICES}}
FIELDS = dict.fromkeys((*PLACES.values(), "answer", "difficulty", "length", "domain"), str)
TAGS = ("difficulty", "domain")


def records_of(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The file, and its checked records."""
    path = next((path for path in (folder / "data.json", folder / "data.jsonl") if path.exists()), None)
    if path is None:
        raise SpecacheError(f"no LongBench v2 file in {folder}: wanted is data.json, or data.jsonl")
    records = placed_records(path, FIELDS)
    for place, record in records:
        check_known(place, record, "answer", CHOICES)
        check_known(place, record, "length", LENGTHS)
    return path, [record for _, record in records]


def template_of(folder: Path) -> str:
    """LongBench v2's prompt: the text, and behind it the question and its choices."""
    places = [place / "0shot.txt" for place in (folder, folder / "prompts", folder.parent / "prompts")]
    path = next((place for place in places if place.exists()), None)
    if path is None:
        raise SpecacheError(
            f"no 0shot.txt in {folder} or its prompts/: copy it from LongBench's repository, folder prompts"
        )
    template = text_of(path)
    first = min(PLACES, key=template.find)
    if first != "$DOC$" or any(template.count(place) != 1 for place in PLACES):
        raise SpecacheError(f"{path}: a prompt has each of {', '.join(PLACES)} once, $DOC$ first")
    return template


def filled(text: str, record: Mapping[str, Any]) -> str:
    """The text with a record's stripped fields in their places. Placeholders within a field are left alone."""
    places = "|".join(map(re.escape, PLACES))
    return re.sub(places, lambda found: record[PLACES[found[0]]].strip(), text)


def ask(bench: Bench, template: str, record: Mapping[str, Any]) -> Ask:
    """The text and the question behind it, encoded separately in every mode."""
    context, place, question = template.partition("$DOC$")
    before, behind = around(bench, bench.chat)
    tail = [*bench.reader.encode(filled(question, record)), *behind]
    tags = {tag: record[tag] for tag in TAGS}
    return parted(bench, before, filled(context + place, record), tail, NEW_TOKENS, (record["answer"],), tags)


def means(each: Sequence[Mapping[str, Any]], tag: str) -> dict[str, float]:
    """The mean score of each value of a tag."""
    scores: dict[str, list[float]] = {}
    for one in each:
        scores.setdefault(one[tag], []).append(one["score"])
    return {value: sum(found) / len(found) for value, found in sorted(scores.items())}


def cells(bench: Bench) -> list[Cell]:
    """One cell a length that the file has."""
    folder = data_folder(bench.data, "longbench_v2")
    path, records = records_of(folder)
    template, facts = template_of(folder), {"data": file_hash(path), "chat": bench.chat}

    def cell(length: str) -> Cell:
        chosen = [record for record in records if record["length"] == length][: bench.samples]
        asks = sorted((ask(bench, template, record) for record in chosen), key=lambda ask: len(ask.prompt))

        def measure(runner: Runner) -> Outcome:
            found = scored(runner, asks, NEW_TOKENS, metrics.letter, "accuracy", bench.blind)
            found.detail.update({f"by_{tag}": means(found.detail["each"], tag) for tag in TAGS})
            return found

        longest = max(len(ask.prompt) for ask in asks) + NEW_TOKENS
        return Cell(length, longest, measure, {**facts, "prompt": template})

    there = {record["length"] for record in records}
    return [cell(length) for length in LENGTHS if length in there]
