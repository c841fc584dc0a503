"""Closeness to the full cache: the same continuations for every method, each of its kind."""

from __future__ import annotations

import io
import itertools
import tarfile

import pytest
import torch

from conftest import byte_tokenizer, greedy, prompt, tiny_llama
from specache_compile.evaluation.reader import Reader
from specache_compile.evaluation.runner import Runner
from specache_compile.evaluation.settings import parse_setting, running
from specache_compile.evaluation.tasks.closeness import KINDS, STEPS, Continuations, measure
from specache_compile.evaluation.tasks.task import Bench
from unseen_text import SOURCES, release_notes

LENGTH = 160
LOSSLESS = "specache:bits=1,group_size=32,residual_length=32,setting=paper,top_k=1024"
LOSSY = "kivi:bits=1,group_size=32,residual_length=32"


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(tiny_llama(), Reader(byte_tokenizer()), batch_size=2)


@pytest.fixture(scope="module")
def known() -> Continuations:
    return Continuations(prompt(LENGTH, 4).tolist(), seed=0)


def test_the_continuations_are_the_text_the_greedy_tokens_and_sampled_ones(
    runner: Runner, known: Continuations
) -> None:
    ids = runner.ids(known.rows)
    tokens = {kind: torch.cat([batch[kind].tokens for batch in known.of(runner)]) for kind in KINDS}
    assert torch.equal(tokens["forced"], ids[:, -STEPS:])
    assert torch.equal(tokens["greedy"], greedy(runner.model, ids[:, :-STEPS], STEPS)[:, -STEPS:])
    assert not torch.equal(tokens["sampled"], tokens["greedy"])
    again = Continuations(known.rows, seed=0).of(runner)[0]["sampled"].tokens
    assert torch.equal(again, tokens["sampled"][:2]), "the seed says them"


@pytest.mark.parametrize("method", ["uncompiled", LOSSLESS])
def test_what_is_lossless_is_at_no_distance(runner: Runner, known: Continuations, method: str) -> None:
    with running(runner.model, parse_setting(method), "eager"):
        kinds = measure(runner, known).detail["kinds"]
    for kind in KINDS:
        assert abs(kinds[kind]["kl"]) < 1e-3  # the full cache's log-probabilities are kept in half precision
        assert kinds[kind]["agreement"] == 1.0


def test_what_is_lossy_is_at_its_mean_distance(runner: Runner, known: Continuations) -> None:
    with running(runner.model, parse_setting(LOSSY), "eager"):
        outcome = measure(runner, known)
    forced = outcome.detail["kinds"]["forced"]
    assert outcome.samples == len(forced["each"]) == 4
    assert forced["kl"] == pytest.approx(sum(forced["each"]) / 4)
    assert forced["kl"] > 0.01
    assert outcome.score == forced["agreement"] < 1


def test_the_unseen_text_is_the_release_notes_in_order() -> None:
    files = {f"docs/releases/{name}.txt": f"notes of {name}" for name in ("6.1", "5.2.10", "5.2", "5.1", "5.2.2")}
    files["CHANGELOG.md"] = f"newest\n{SOURCES['mypy'].older}\nold"
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"django-6.1.3/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    notes = release_notes(archive.getvalue(), SOURCES["django"])
    assert notes == "notes of 5.2\nnotes of 5.2.2\nnotes of 5.2.10\nnotes of 6.1"
    assert release_notes(archive.getvalue(), SOURCES["mypy"]) == "newest"


@pytest.mark.filterwarnings("error")
def test_windows_do_not_overlap_where_the_text_is_long_enough() -> None:
    assert all(after[0] - before[0] >= 200 for before, after in itertools.pairwise(windows(5)))


def test_windows_that_must_overlap_are_spread_and_told() -> None:
    reason = "10 windows of 200 tokens overlap in a text of 1,024: .* or --samples 5"
    with pytest.warns(UserWarning, match=reason):
        rows = windows(10)
    assert all(after[0] > before[0] for before, after in itertools.pairwise(rows))


def windows(samples: int) -> list[list[int]]:
    """Of 200 tokens from a text of 1,024, the same whenever they are drawn."""
    bench = Bench(Reader(byte_tokenizer()), samples, 0)
    vars(bench)["haystack"] = list(range(1024))
    rows = bench.windows_apart(200)
    assert all(row == list(range(row[0], row[0] + 200)) for row in rows)
    assert len(rows) == samples
    assert bench.windows_apart(200) == rows
    return rows
