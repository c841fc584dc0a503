"""The command that runs every family: a row says what happened, finished ones are kept, a hang or an error is a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import every_family

LLAMA = ("llama", "LlamaForCausalLM")
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


@pytest.mark.parametrize(
    "change",
    [{"equal": 3}, {"finite": False}, {"one lane": "no positions"}, {"outcome": "failed", "why": "RuntimeError: no"}],
)
def test_what_is_wrong_is_the_exit_status(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(every_family, "within", lambda family, limit: {**RAN, **change})
    assert every_family.main(["--only", "llama", "--out", str(tmp_path / "rows.jsonl")]) == 1
