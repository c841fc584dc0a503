"""Scores of an answer, 0 to 1, against one reference. Each is a dataset's own and names the dataset."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from specache_compile.errors import SpecacheError


def exact(answer: str, reference: str) -> float:
    """Whether the answer begins with the reference: pass keys."""
    return float(answer.lstrip().startswith(reference))


def found_all(answer: str, references: Sequence[str]) -> float:
    """RULER: the share of the references that occur in the answer, in upper or lower case."""
    return sum(reference.lower() in answer.lower() for reference in references) / len(references)


def found_any(answer: str, references: Sequence[str]) -> float:
    """RULER's question answering: whether any of the references occurs in the answer."""
    return float(any(reference.lower() in answer.lower() for reference in references))


def words(text: str) -> list[str]:
    """SQuAD's normal form: lower case, no punctuation, no articles."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall over words (SQuAD, LongBench's question answering)."""
    given, wanted = words(answer), words(reference)
    shared = sum((Counter(given) & Counter(wanted)).values())
    return 2 * shared / (len(given) + len(wanted)) if shared else 0.0


def rouge_l(answer: str, reference: str) -> float:
    """F-measure of the longest common subsequence of words, by Google's rouge-score, without stemming.

    LongBench itself uses the package `rouge`, which cuts words only at white space and joins sentences differently.
    Figures differ by a point or so.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise missing("rouge-score") from None
    return float(RougeScorer(["rougeL"]).score(reference, answer)["rougeL"].fmeasure)


def overlaps(answer: str, reference: str) -> dict[str, float]:
    """BLEU by sacrebleu, smoothed as it does for one sentence; ROUGE-1, -2 and -L by Google's rouge-score, without
    stemming; and whether the two are the same to the letter."""
    try:
        from sacrebleu import sentence_bleu
    except ImportError:
        raise missing("sacrebleu") from None
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise missing("rouge-score") from None
    names = {"ROUGE-1": "rouge1", "ROUGE-2": "rouge2", "ROUGE-L": "rougeL"}
    found = RougeScorer(list(names.values())).score(reference, answer)
    return {
        "BLEU": sentence_bleu(answer, [reference]).score / 100,
        **{name: float(found[key].fmeasure) for name, key in names.items()},
        "the same": float(answer == reference),
    }


def edit_similarity(answer: str, reference: str) -> float:
    """LongBench's code completion: similarity of the answer's first line that is code, by rapidfuzz (indel ratio)."""
    try:
        from rapidfuzz.fuzz import ratio
    except ImportError:
        raise missing("rapidfuzz") from None
    lines = answer.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return ratio(code, reference) / 100


def classification(answer: str, reference: str, classes: Sequence[str]) -> float:
    """LongBench: 1 / (classes that the answer names) if the right one is among them.

    A class whose name is part of the right one's does not count against it.
    """
    named = [name for name in classes if name in answer and not (name in reference and name != reference)]
    return 1 / len(named) if reference in named else 0.0


def numbers(answer: str, reference: str) -> float:
    """LongBench's counting and retrieval: the share of the answer's numbers that are the reference's last one."""
    given, wanted = re.findall(r"\d+", answer), re.findall(r"\d+", reference)
    return given.count(wanted[-1]) / len(given) if given and wanted else 0.0


def letter(answer: str, references: Sequence[str]) -> float:
    """LongBench v2: whether the letter that the answer calls correct, in brackets or not, is the reference. An answer
    without one is wrong."""
    said = answer.replace("*", "")
    found = next(
        (m for form in (r"\(([A-D])\)", "([A-D])") if (m := re.search(f"The correct answer is {form}", said))), None
    )
    return float(found is not None and found[1] == references[0])


def first_letter(answer: str, references: Sequence[str]) -> float:
    """SCBench's choices: whether the answer's first letter that stands alone is the reference."""
    found = re.search(r"\b[A-D]\b", answer)
    return float(found is not None and found[0] == references[0])


def first_number(answer: str, references: Sequence[str]) -> float:
    """SCBench's statistics of a list: whether the answer's first number is the reference, its fraction cut off."""
    found = re.search(r"-?\d+(?:\.\d+)?", answer)
    return float(found is not None and int(float(found[0])) == int(float(references[0])))


def contained(answer: str, references: Sequence[str]) -> float:
    """SCBench's strings: whether the answer holds the reference, letter by letter."""
    return float(references[0] in answer)


def missing(package: str) -> SpecacheError:
    return SpecacheError(f"this metric needs the package {package}: pip install 'specache-compile[eval]'")
