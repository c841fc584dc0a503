"""LongBench from the person's own files: its JSONL fields, its prompts, its answer lengths, its metrics.

`--data` names the folder of the datasets (`qasper.jsonl`, ...). LongBench's own `dataset2prompt.json` and
`dataset2maxlen.json` are there too, or in its `config/`. Each dataset is a cell. A prompt beyond the model's context
loses its middle, as in LongBench's own program. `--chat` puts the tokenizer's chat template around the prompt, except
where LongBench leaves it out. With `--blind` the prompt up to its context's end is read before the rest is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specache_compile.errors import SpecacheError
from specache_compile.evaluation import metrics
from specache_compile.evaluation.runner import Runner

from .prompts import around, parted, without_middle
from .records import data_folder, file_hash, read_mapping, read_records
from .task import Ask, Bench, Cell, Outcome, scored

FIELDS = {"input": str, "context": str, "answers": list}
Metric = Callable[[str, str, Sequence[str]], float]


def plain(metric: Callable[[str, str], float]) -> Metric:
    """A metric that does not look at the dataset's classes."""
    return lambda answer, reference, classes: metric(answer, reference)


F1, ROUGE, CODE, NUMBERS = map(plain, (metrics.f1, metrics.rouge_l, metrics.edit_similarity, metrics.numbers))
METRICS: dict[str, tuple[str, Metric]] = {
    **dict.fromkeys(
        ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"), ("F1", F1)
    ),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), ("ROUGE-L", ROUGE)),
    **dict.fromkeys(("trec", "lsht"), ("accuracy", metrics.classification)),
    **dict.fromkeys(("passage_count", "passage_retrieval_en", "passage_retrieval_zh"), ("accuracy", NUMBERS)),
    **dict.fromkeys(("lcc", "repobench-p"), ("edit similarity", CODE)),
}
# Few-shot prompts and code to complete, which LongBench gives to chat models as they are.
NO_CHAT = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
FIRST_LINE_ONLY = ("trec", "triviaqa", "samsum", "lsht")


def score_of(dataset: str, answer: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """The best score over the references."""
    if dataset in FIRST_LINE_ONLY:
        answer = answer.lstrip("\n").split("\n")[0]
    return max(METRICS[dataset][1](answer, reference, classes) for reference in references)


def config(folder: Path, name: str) -> dict[str, Any]:
    """One of LongBench's two tables, from the data's folder or its `config/`."""
    places = [place / name for place in (folder, folder / "config", folder.parent / "config")]
    path = next((place for place in places if place.exists()), None)
    if path is None:
        raise SpecacheError(f"no {name} in {folder} or its config/: copy it from LongBench's repository, folder config")
    return read_mapping(path)


def entry(table: dict[str, Any], dataset: str, name: str, kind: type) -> Any:
    if not isinstance(table.get(dataset), kind):
        raise SpecacheError(f"{name} has no {kind.__name__} for the dataset {dataset!r}")
    return table[dataset]


def filled(dataset: str, template: str, record: dict[str, Any]) -> str:
    try:
        return template.format(**record)
    except (KeyError, IndexError) as error:
        raise SpecacheError(f"{dataset}: the prompt asks for a field {error} that a record does not have") from None


def prompt(bench: Bench, dataset: str, template: str, record: dict[str, Any], new_tokens: int) -> list[int]:
    """A record's prompt as token ids. Beyond the model's context it loses its middle."""
    text, reader, room = filled(dataset, template, record), bench.reader, bench.limit - new_tokens
    if bench.chat and dataset not in NO_CHAT:
        kept = without_middle(reader.encode(text), room - len(reader.chat("")))
        return without_middle(reader.chat(reader.decode(kept)), room)
    begin = reader.begin()
    return [*begin, *without_middle(reader.encode(text), room - len(begin))]


def halves(dataset: str, template: str) -> tuple[str, str]:
    """A template's two parts: up to the context's end, and the rest."""
    before, context, behind = template.partition("{context}")
    if not context or "{input}" in before or not behind.strip():
        raise SpecacheError(
            f"{dataset}: its prompt does not have the question behind the context: --blind cannot keep them apart"
        )
    return before + context, behind


def ask(bench: Bench, dataset: str, template: str, record: dict[str, Any], new_tokens: int) -> Ask:
    """A record's prompt. For a blind reading the two halves are encoded separately, and only the first loses its
    middle."""
    answers = tuple(record["answers"])
    if not bench.blind:
        return Ask(prompt(bench, dataset, template, record, new_tokens), answers)
    context, question = (filled(dataset, half, record) for half in halves(dataset, template))
    before, behind = around(bench, bench.chat and dataset not in NO_CHAT)
    return parted(bench, [*before], context, [*bench.reader.encode(question), *behind], new_tokens, answers)


def cell(bench: Bench, path: Path, template: str, new_tokens: int) -> Cell:
    if new_tokens >= bench.limit:
        raise SpecacheError(f"{path.stem}: answers of {new_tokens} tokens do not fit a context of {bench.limit}")
    records = read_records(path, FIELDS)[: bench.samples]
    for record in records:
        if not record["answers"]:
            raise SpecacheError(f"{path}: a record has no answers")
    classes = records[0].get("all_classes") or []
    asks = [ask(bench, path.stem, template, record, new_tokens) for record in records]
    asks.sort(key=lambda ask: len(ask.prompt))

    def measure(runner: Runner) -> Outcome:
        return scored(
            runner, asks, new_tokens, lambda answer, wanted: score_of(path.stem, answer, wanted, classes),
            METRICS[path.stem][0], bench.blind,
        )  # fmt: skip

    longest = max(len(ask.prompt) for ask in asks) + new_tokens
    facts = {"prompt": template, "new_tokens": new_tokens, "chat": bench.chat}
    return Cell(path.stem, longest, measure, {**facts, "data": file_hash(path)})


def cells(bench: Bench) -> list[Cell]:
    """One cell for each of the folder's files that is a LongBench dataset."""
    folder = data_folder(bench.data, "longbench")
    paths = [path for path in sorted(folder.glob("*.jsonl")) if path.stem in METRICS]
    if not paths:
        raise SpecacheError(f"no LongBench file in {folder}: wanted is one of {', '.join(METRICS)} (.jsonl)")
    prompts, lengths = config(folder, "dataset2prompt.json"), config(folder, "dataset2maxlen.json")
    return [
        cell(
            bench, path, entry(prompts, path.stem, "dataset2prompt.json", str),
            entry(lengths, path.stem, "dataset2maxlen.json", int),
        )
        for path in paths
    ]  # fmt: skip
