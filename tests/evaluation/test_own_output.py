"""Summaries, reconstructions and answers to instructions against the full cache's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import byte_tokenizer, tiny_llama
from specache_compile.evaluation.cell_tables import table
from specache_compile.evaluation.reader import Reader
from specache_compile.evaluation.rows import Row
from specache_compile.evaluation.runner import Runner
from specache_compile.evaluation.settings import parse_setting, running
from specache_compile.evaluation.tasks.own_output import (
    INSTRUCTIONS,
    NEW_TOKENS,
    RECONSTRUCTION,
    REQUESTS,
    Outputs,
    about_texts,
    cells,
    measure,
    of_instructions,
)
from specache_compile.evaluation.tasks.task import Bench, Outcome

BYTES = Reader(byte_tokenizer())
LOSSY = "kivi:bits=1,group_size=32,residual_length=32"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"word{number}" for number in range(900)))
    return Bench(BYTES, (400,), 3, 0, 8192, (text,))


def test_a_prompt_is_a_window_and_its_request_and_leaves_room_for_the_answer(bench: Bench) -> None:
    asked = about_texts(bench, 400, RECONSTRUCTION)
    for prompt, text in zip(asked.prompts, asked.texts, strict=True):
        assert len(prompt) + NEW_TOKENS[RECONSTRUCTION] == 400
        assert BYTES.decode(prompt).endswith(REQUESTS[RECONSTRUCTION] + "\n")
        assert BYTES.decode(prompt).startswith(text)
        assert len(text) == NEW_TOKENS[RECONSTRUCTION]


def test_cells_are_two_a_length_and_one_of_instructions(bench: Bench) -> None:
    assert [cell.name for cell in cells(bench)] == ["400 summary", "400 reconstruction", "instruction"]
    assert len(of_instructions(bench).prompts) == 3
    assert len(set(INSTRUCTIONS)) == len(INSTRUCTIONS) == 32


@pytest.mark.slow
def test_the_full_caches_outputs_are_the_measure(bench: Bench) -> None:
    """An exact method says them to the letter, a lossy one does not, and the table says so."""
    runner = Runner(tiny_llama(vocab_size=256), BYTES, batch_size=2)
    full = Outputs(about_texts(bench, 400, RECONSTRUCTION).prompts, ["word"] * 3, 24)

    def outcome(method: str) -> Outcome:
        with running(runner.model, parse_setting(method), "eager"):
            return measure(runner, full)

    exact, lossy = outcome("full"), outcome(LOSSY)
    with running(runner.model, parse_setting("uncompiled"), "eager"):
        assert [one["text"] for one in exact.detail["each"]] == runner.answers(full.prompts, 24)
    assert exact.detail["overlaps"]["the same"][0] == 1
    assert lossy.detail["overlaps"]["the same"][0] < 1
    assert lossy.score == pytest.approx(sum(one["ROUGE-L"] for one in lossy.detail["each"]) / 3)
    shown = table([
        Row("k", "own_output", method, "400", 400, found.score, found.metric, 3, 0, 0.2, 1.0, found.detail)
        for method, found in (("full", exact), (LOSSY, lossy))
    ]).splitlines()  # fmt: skip
    assert "BLEU" in shown[0]
    assert shown[0].endswith("full cache : text")
    assert "1.000 ± 0.000" in shown[2]
