"""The command that runs every family: a row says what happened, finished ones are kept, a hang or an error is a row."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
every_family = importlib.import_module("every_family")
tiny_families = importlib.import_module("tiny_families")

LLAMA, BLOOM = ("llama", "LlamaForCausalLM"), ("bloom", "BloomForCausalLM")
RAN = {"outcome": "ran", "equal": 12, "tokens": 12, "rewritten": 2, "attentions": 2, "reasons": [], "lanes": 2,
       "one lane": None, "warned": False, "finite": True}  # fmt: skip


def test_a_family_that_is_rewritten_whole_is_right() -> None:
    row = every_family.measured(LLAMA)
    assert {name: row[name] for name in RAN} == RAN
    assert 0 < row["largest difference"] < 1e-3
    assert not every_family.is_wrong(row)


def test_only_windows_next_to_rewritten_attentions_need_no_warning() -> None:
    assert not every_family.is_wrong({**RAN, "reasons": [every_family.WINDOW]})
    assert every_family.is_wrong({**RAN, "reasons": [every_family.WINDOW], "rewritten": 0})
    assert every_family.is_wrong({**RAN, "reasons": ["another reason"]})


@pytest.mark.slow
def test_a_process_that_hangs_or_dies_is_a_row() -> None:
    assert every_family.within(LLAMA, 0.01) == {"outcome": "failed", "why": "no answer in 0.01 seconds"}
    assert every_family.within(("llama", "NoSuchClass"), 60)["outcome"] == "not run"
    assert every_family.within(LLAMA, 120)["outcome"] == "ran"


@pytest.fixture
def families_run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The families that the command runs, each with a row made up."""
    names: list[str] = []

    def within(family: tuple[str, str], limit: float) -> dict[str, Any]:
        names.append(family[0])
        return dict(RAN)

    monkeypatch.setattr(every_family, "within", within)
    return names


def test_what_is_there_is_not_run_again(
    families_run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ["--out", str(tmp_path / "rows.jsonl")]
    assert every_family.main(["--only", "llama", "bloom", *out]) == 0
    assert every_family.main(["--only", "llama", "gpt2", *out]) == 0
    assert families_run == ["llama", "bloom", "gpt2"]
    assert "3 families with transformers" in capsys.readouterr().out
    monkeypatch.setitem(every_family.VERSIONS, "transformers", "99.0")
    every_family.main(["--only", "llama", *out])
    assert families_run[3:] == ["llama"]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["family"] for row in rows] == ["llama", "bloom", "gpt2", "llama"]
    assert [row["transformers"] for row in every_family.newest(rows)] == ["99.0"]


@pytest.mark.parametrize(
    "change",
    [
        {"equal": 3},
        {"finite": False},
        {"one lane": "no positions"},
        {"outcome": "failed", "why": "RuntimeError: no"},
    ],
)
def test_what_is_wrong_is_the_exit_status(
    change: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(every_family, "within", lambda family, limit: {**RAN, **change})
    assert every_family.main(["--only", "llama", "--out", str(tmp_path / "rows.jsonl")]) == 1
    out = capsys.readouterr().out
    assert "wrong or failed: 1" in out
    assert json.loads(out.splitlines()[0]).items() >= change.items()
