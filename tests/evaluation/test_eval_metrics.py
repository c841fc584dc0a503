"""The metrics of `specache eval`, against values worked out by hand and plain definitions."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from specache_compile.evaluation import metrics
from specache_compile.evaluation.tasks.longbench import METRICS, score_of


def longest_common(a: list[str] | str, b: list[str] | str) -> int:
    """Length of the longest common subsequence, by its definition's recurrence."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("The Eiffel Tower.", "eiffel tower", 1.0),
        ("in Paris, France", "Paris", 0.5),  # precision 1/3, recall 1
        ("a the an", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("yes yes no", "yes no no", 2 / 3),  # words count as often as they occur
    ],
)
def test_f1_is_squads(answer: str, reference: str, score: float) -> None:
    assert metrics.f1(answer, reference) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "reference"), [("the cat sat on the mat", "the cat lay on a mat"), ("a b c", "c b a"), ("x", "y")]
)
def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence(answer: str, reference: str) -> None:
    common = longest_common(answer.split(), reference.split())
    assert metrics.rouge_l(answer, reference) == pytest.approx(
        2 * common / (len(answer.split()) + len(reference.split()))
    )


def shared_grams(answer: str, reference: str, size: int) -> tuple[int, int, int]:
    """Phrases of `size` words that both have, and how many each has."""
    mine, theirs = (Counter(zip(*(x.split()[n:] for n in range(size)), strict=False)) for x in (answer, reference))
    return (mine & theirs).total(), mine.total(), theirs.total()


def test_overlaps_are_bleu_and_rouge_by_their_formulas() -> None:
    """BLEU of a pair with phrases of every length in common, so that nothing is smoothed."""
    answer, reference = "the cat sat on the mat at home", "a cat sat on the mat all day at home"
    found = metrics.overlaps(answer, reference)
    shares = [shared / mine for shared, mine, _ in (shared_grams(answer, reference, n) for n in (1, 2, 3, 4))]
    assert found["BLEU"] == pytest.approx(math.exp(1 - 10 / 8) * math.prod(shares) ** 0.25)
    for size in (1, 2):
        shared, mine, theirs = shared_grams(answer, reference, size)
        assert found[f"ROUGE-{size}"] == pytest.approx(2 * shared / (mine + theirs))
    assert found["ROUGE-L"] == metrics.rouge_l(answer, reference)
    assert found["the same"] == 0
    assert list(metrics.overlaps(reference, reference).values()) == pytest.approx([1.0] * 5)


def test_edit_similarity_is_of_the_first_line_of_code() -> None:
    reference = "return value + 1"
    answer = "\n# a comment\n`quoted`\nreturn values + 1\nmore"
    line = "return values + 1"
    expected = 2 * longest_common(line, reference) / (len(line) + len(reference))
    assert metrics.edit_similarity(answer, reference) == pytest.approx(expected)
    assert metrics.edit_similarity("// only comments", reference) == 0.0


def test_classification_shares_its_point_among_the_classes_named() -> None:
    classes = ("Person", "Person, group", "City")
    assert metrics.classification("City", "City", classes) == 1.0
    assert metrics.classification("City or Person", "City", classes) == 0.5
    assert metrics.classification("Person, group", "Person, group", classes) == 1.0  # "Person" is a part of it
    assert metrics.classification("nothing", "City", classes) == 0.0


def test_numbers_are_right_by_share() -> None:
    assert metrics.numbers("Paragraph 7", "Paragraph 7") == 1.0
    assert metrics.numbers("7 or 8", "Paragraph 7") == 0.5
    assert metrics.numbers("17", "7") == 0.0
    assert metrics.numbers("none", "7") == 0.0


def test_ruler_counts_the_references_found() -> None:
    assert metrics.found_all("abcde and XYZ", ["ABCDE", "xyz", "qqq"]) == pytest.approx(2 / 3)
    assert metrics.found_any("in paris", ["Paris", "London"]) == 1.0
    assert metrics.found_any("in Rome", ["Paris", "London"]) == 0.0


@pytest.mark.parametrize("dataset", METRICS)
def test_every_longbench_metric_gives_the_reference_itself_full_marks(dataset: str) -> None:
    assert score_of(dataset, "Paragraph 3", ["something else 9", "Paragraph 3"], ["Paragraph 3", "City"]) == 1.0


def test_some_longbench_answers_count_up_to_their_first_line() -> None:
    assert score_of("triviaqa", "\nParis\nPassage: more text", ["Paris"], []) == 1.0
    assert score_of("hotpotqa", "\nParis\nPassage: more text", ["Paris"], []) < 1.0
